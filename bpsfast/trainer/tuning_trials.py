"""Runs autotune's trials on rank 0, one after another: chooses the settings of the next steps, and those to prepare.

    present settings -> the defaults, if those are others -> what the search proposes, one trial at a time -> the best

A trial is a few steps, of which the first does not count; it ends early at a step that is clearly too slow. Between
trials steps use the best point so far, while the next one is prepared.
"""
from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from ..base.settings import Settings
from ..orchestration.messages import TensorSpec
from ..orchestration.placement.partition import nbytes_of
from ..orchestration.placement.shares import Machine
from .session import Session
from .tuning_search import STREAMS, Search, TuningPoint, expectation

log = logging.getLogger("bpsfast.tuner")

#: Steps that a trial measures; first steps of a job, which are not measured because memory is allocated in them.
N_MEASURED, N_COLD = 3, 3
#: A step this many times the best one's median ends its trial, if the one before it was no better.
HOPELESS = 1.25
#: After this many steps the best point so far stays.
_MOST_STEPS = 60


class Decision(NamedTuple):
    """What all ranks do next. `number` counts decisions.

    Steps use `active`. `coming`, if not None, is prepared and used as soon as all ranks have it. `is_last`: `active` is
    the result of the search.
    """

    number: int
    active: TuningPoint
    coming: TuningPoint | None = None
    is_last: bool = False


class Trial(NamedTuple):
    """A row of the report: seconds of a step (None: not possible), number of steps, and why it was tried."""

    point: TuningPoint
    step_s: float | None
    n_steps: int
    reason: str


class TrialRunner:
    """Decides after every step which point the next steps use.

    *present* and *default* are the job's settings and the default settings. *stored* is the result of an earlier job,
    which is used without a search.
    """

    def __init__(self, search: Search, present: TuningPoint, default: TuningPoint,
                 stored: TuningPoint | None = None) -> None:
        self.trials: list[Trial] = []
        self.n_steps = 0
        self.decision = Decision(0, present)
        self._search = search
        self._default = default
        self._stored = stored
        self._trying, self._reason = present, "present"
        self._used: TuningPoint | None = None
        self._before_s = 0.0
        self._samples: list[float] = []

    @property
    def best(self) -> TuningPoint:
        return self._search.best if self._search.measured else self.decision.active

    def observe(self, point: TuningPoint, step_s: float) -> Decision:
        """Note that a step at *point* took *step_s*; return the decision, the same as before if nothing changes."""
        self.n_steps += 1
        if self.decision.is_last:
            return self.decision
        if self._stored is not None:
            if self.n_steps == 1:
                self._decide(self.decision.active, self._stored)
            elif point == self._stored:
                self._decide(point, None, is_last=True)
            return self.decision
        if point != self._used:
            self._used, self._samples, self._before_s = point, [], step_s
        elif point == self._trying and self.n_steps > N_COLD:
            self._samples.append(step_s)
            hopeless = (self._search.measured and min(step_s, self._before_s)
                        > HOPELESS * self._search.measured[self._search.best])
            self._before_s = step_s
            if len(self._samples) >= N_MEASURED or hopeless:
                self._conclude()
        if self.n_steps >= _MOST_STEPS and not self.decision.is_last:
            self._decide(self.best, None, is_last=True)
        return self.decision

    def failed(self, point: TuningPoint) -> Decision:
        """Note that the coming *point* is not possible."""
        self.trials.append(Trial(point, None, 0, self._reason))
        self._search.refuse(point)
        if self._stored is not None:
            self._stored = None
            self._trying, self._reason = self.decision.active, "present"
            self._decide(self.decision.active, None)
        elif self._search.measured:
            self._next()
        return self.decision

    def _conclude(self) -> None:
        """End the trial and begin the next."""
        step_s = median(self._samples)
        self.trials.append(Trial(self._trying, step_s, len(self._samples), self._reason))
        self._search.tell(self._trying, step_s)
        self._next()

    def _next(self) -> None:
        if self._default not in {trial.point for trial in self.trials}:
            self._trying, self._reason = self._default, "default"
        else:
            proposal = self._search.propose()
            if proposal is None:
                self._decide(self.best, None, is_last=True)
                return
            self._trying, self._reason = proposal[0], f"expected gain {100 * proposal[1]:.1f} %"
        self._used = None
        self._decide(self.best, self._trying)

    def _decide(self, active: TuningPoint, coming: TuningPoint | None, is_last: bool = False) -> None:
        self.decision = Decision(self.decision.number + 1, active, coming, is_last)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search so far: `chosen` is the best point, `trials` are all trials in order."""

    chosen: TuningPoint
    trials: tuple[Trial, ...]
    n_steps: int
    is_over: bool


def folder(setting: str) -> Path:
    """Return the folder of results: *setting*, or ``bpsfast/tuned`` in the user's cache."""
    if setting:
        return Path(setting).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bpsfast" / "tuned"


def key(tensors: Sequence[tuple[str, tuple[int, ...], str]], cluster: Any) -> str:
    """Return the name of the result for *tensors* (name, shape, dtype) on *cluster*, a JSON value."""
    text = json.dumps([tensors, cluster], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def read(path: Path) -> Result | None:
    """Return the result in *path*; None if there is none, or it cannot be read, which is logged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as exc:
        log.warning("no result of tuning can be read from %s (%s): the search starts from the beginning", path, exc)
        return None


def write(path: Path, result: Result) -> None:
    """Write *result* to *path* atomically; a failure is only logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(msgspec.json.format(msgspec.json.encode(result), indent=2))
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as exc:
        log.warning("the result of tuning cannot be written to %s: %s", path, exc)


def plain(result: Result) -> dict[str, Any]:
    """Return *result* as dictionaries and lists, with field names."""
    return {
        "chosen": result.chosen._asdict(), "n_steps": result.n_steps, "is_over": result.is_over,
        "trials": [{**trial._asdict(), "point": trial.point._asdict()} for trial in result.trials],
    }


class RecordedTrials(TrialRunner):
    """The trials of *specs* in the job of *session*, starting at *present*; stores and reports results. Rank 0, one
    thread.

    *tuned*: the point that was saved with the model, if any, which is used without a search.
    """

    def __init__(self, session: Session, specs: Mapping[str, TensorSpec], present: TuningPoint,
                 tuned: TuningPoint | None = None) -> None:
        settings, usual = session.settings, Settings()
        tensors = [(spec.name, spec.shape, spec.dtype) for spec in specs.values()]
        self._file = folder(settings.tuned_dir) / (key(
            tensors, [session.machines, sorted(session.transports.items()), settings.placement]) + ".json")
        self._report = Path(settings.autotune_report) if settings.autotune_report else None
        stored = read(self._file) if self._report is None else None  # a report needs a search
        machines = [Machine(n_ranks > 0, rate) for n_ranks, rate in session.machines]
        by_tcp = any(transport.startswith("tcp") for transport in session.transports.values())
        search = Search(expectation(machines, [nbytes_of(spec) for spec in specs.values()]),
                        STREAMS if by_tcp else [settings.tcp_streams])
        default = TuningPoint(usual.partition_bytes, usual.fusion_bytes, usual.credit_bytes,
                              usual.tcp_streams if by_tcp else settings.tcp_streams)
        chosen = tuned or (stored.chosen if stored is not None else None)
        if chosen is not None and not by_tcp:
            chosen = chosen._replace(n_streams=settings.tcp_streams)
        super().__init__(search, present, default, chosen)
        self._n_reported = 0
        if tuned is not None:
            log.info("using the tuning that was saved with the model: %s", tuned)
        elif stored is not None:
            log.info("using the tuning found earlier for this model and cluster: %s (%s)", stored.chosen, self._file)

    def observe(self, point: TuningPoint, step_s: float) -> Decision:
        """As `TrialRunner.observe`; report the trials."""
        super().observe(point, step_s)
        return self._reported()

    def failed(self, point: TuningPoint) -> Decision:
        """As `TrialRunner.failed`; report the trials."""
        super().failed(point)
        return self._reported()

    def save(self) -> None:
        """Store the result at the end of the search."""
        if not self.trials:
            return  # it is stored already
        result = self._result(is_over=True)
        write(self._file, result)
        if self._report is not None:
            write(self._report, result)
        log.info("tuned in %d steps and %d trials: %s (stored in %s)", result.n_steps, len(result.trials),
                 result.chosen, self._file)

    def _reported(self) -> Decision:
        if self._report is not None and len(self.trials) != self._n_reported:
            self._n_reported = len(self.trials)
            write(self._report, self._result(is_over=False))
        return self.decision

    def _result(self, is_over: bool) -> Result:
        return Result(chosen=self.best, trials=tuple(self.trials), n_steps=self.n_steps, is_over=is_over)
