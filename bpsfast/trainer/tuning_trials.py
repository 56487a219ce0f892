"""Trials one after another: which point the next steps use, and which is prepared beside them. Pure; rank 0's.

    present settings -> the defaults, if those are others -> what the search proposes, one trial at a time -> the best

A trial is a few steps, of which the first does not count; it is over at the first one that shows that it is hopeless.
Then the best so far goes on, and the next trial is prepared beside it: the best is always there to go back to.
"""
from __future__ import annotations

from statistics import median
from typing import NamedTuple

from .tuning_point import TuningPoint
from .tuning_search import Search

#: Steps that a trial measures, and the first ones of a job, in which memory is found and threads settle.
N_MEASURED, N_COLD = 3, 3
#: A step this many times the best one's median ends its trial, if the one before it was no better.
HOPELESS = 1.25


class Decision(NamedTuple):
    """What all ranks are to do. `number` counts decisions.

    Steps use `active`; if `coming` is not None it is prepared, and used as soon as all have it. `is_last`: `active` is
    what was looked for.
    """

    number: int
    active: TuningPoint
    coming: TuningPoint | None = None
    is_last: bool = False


class Trial(NamedTuple):
    """One row of the report: seconds of a step (None: it could not be had), over how many, and why it was tried."""

    point: TuningPoint
    step_s: float | None
    n_steps: int
    reason: str


class TrialRunner:
    """Decides after every step.

    Parameters
    ----------
    present, default
        The settings of the job, and those it would have without any.
    stored
        What an earlier job found best: then that is used, and nothing is tried.
    max_steps
        After so many steps the best so far stays.
    """

    def __init__(self, search: Search, present: TuningPoint, default: TuningPoint, stored: TuningPoint | None = None,
                 max_steps: int = 60) -> None:
        self.trials: list[Trial] = []
        self.n_steps = 0
        self.decision = Decision(0, present)
        self._search = search
        self._default = default
        self._max_steps = max_steps
        self._stored = stored
        self._trying, self._reason = present, "present"
        self._used: TuningPoint | None = None
        self._before_s = 0.0
        self._samples: list[float] = []

    @property
    def best(self) -> TuningPoint:
        """The best point so far."""
        return self._search.best if self._search.measured else self.decision.active

    def observe(self, point: TuningPoint, step_s: float) -> Decision:
        """Note that a step at *point* took *step_s*; return what is to be done, the same as before if nothing new."""
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
        if self.n_steps >= self._max_steps and not self.decision.is_last:
            self._decide(self.best, None, is_last=True)
        return self.decision

    def failed(self, point: TuningPoint) -> Decision:
        """Note that *point*, which was coming, cannot be had."""
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
