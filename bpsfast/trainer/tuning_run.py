"""Rank 0's tuning of one model: what was stored of it, the pilot, and where its result goes."""
from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.settings import Settings
from ..orchestration.messages import TensorSpec
from ..orchestration.placement.partition import nbytes_of
from ..orchestration.placement.shares import Machine
from . import tuning_results
from .tuning_model import expectation
from .tuning_point import TuningPoint
from .tuning_search import STREAMS, Search
from .tuning_trials import Decision, TrialRunner

if TYPE_CHECKING:
    from .session import Session

log = logging.getLogger("bpsfast.tuner")


class TuningRun:
    """Decides for *specs* of the job of *session*, which begins at *present*. One thread.

    *tuned*: what was saved with the model, if anything: that is used, and nothing is tried.
    """

    def __init__(self, session: Session, specs: Mapping[str, TensorSpec], present: TuningPoint, tuned: TuningPoint | None = None
                 ) -> None:
        settings, usual = session.settings, Settings()
        tensors = [(spec.name, spec.shape, spec.dtype) for spec in specs.values()]
        self._file = tuning_results.folder(settings.tuned_dir) / (tuning_results.key(
            tensors, [session.machines, sorted(session.transports.items()), settings.placement]) + ".json")
        self._report = Path(settings.autotune_report) if settings.autotune_report else None
        stored = tuning_results.read(self._file) if self._report is None else None  # who wants a report wants a search
        machines = [Machine(n_ranks > 0, rate) for n_ranks, rate in session.machines]
        by_tcp = any(transport.startswith("tcp") for transport in session.transports.values())
        search = Search(expectation(machines, [nbytes_of(spec) for spec in specs.values()]),
                        STREAMS if by_tcp else [settings.tcp_streams])
        default = TuningPoint(usual.partition_bytes, usual.fusion_bytes, usual.credit_bytes,
                        usual.tcp_streams if by_tcp else settings.tcp_streams)
        chosen = tuned or (stored.chosen if stored is not None else None)
        if chosen is not None and not by_tcp:
            chosen = chosen._replace(n_streams=settings.tcp_streams)
        self._pilot = TrialRunner(search, present, default, chosen)
        self._n_trials = 0
        if tuned is not None:
            log.info("what was saved with the model is used: %s", tuned)
        elif stored is not None:
            log.info("what was found before for this model and cluster is used: %s (%s)", stored.chosen, self._file)

    @property
    def decision(self) -> Decision:
        """What all ranks are to do."""
        return self._pilot.decision

    @property
    def best(self) -> TuningPoint:
        """The best so far."""
        return self._pilot.best

    def observe(self, point: TuningPoint, step_s: float) -> None:
        """Note that a step at *point* took *step_s*."""
        self._pilot.observe(point, step_s)
        self._tell()

    def failed(self, point: TuningPoint) -> None:
        """Note that *point* cannot be had."""
        self._pilot.failed(point)
        self._tell()

    def save(self) -> None:
        """Keep what was found: the search is over."""
        result = self._result(is_over=True)
        if not self._pilot.trials:
            return  # it was stored before
        tuning_results.write(self._file, result)
        if self._report is not None:
            tuning_results.write(self._report, result)
        log.info("tuned in %d steps and %d trials: %s (kept in %s)", result.n_steps, len(result.trials), result.chosen,
                 self._file)

    def _tell(self) -> None:
        if self._report is not None and len(self._pilot.trials) != self._n_trials:
            self._n_trials = len(self._pilot.trials)
            tuning_results.write(self._report, self._result(is_over=False))

    def _result(self, is_over: bool) -> tuning_results.Result:
        return tuning_results.Result(chosen=self._pilot.best, trials=tuple(self._pilot.trials), n_steps=self._pilot.n_steps,
                            is_over=is_over)
