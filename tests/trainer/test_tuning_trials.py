"""Trials one after another: what is measured, what is thrown away, when it ends."""
from __future__ import annotations

import pytest

from bpsfast.trainer.tuning_search import Search, TuningPoint
from bpsfast.trainer.tuning_trials import N_COLD, N_MEASURED, TrialRunner

DEFAULT = TuningPoint(4_096_000, 4_096_000, 16_777_216, 2)
BAD = TuningPoint(64_000, 4_096_000, 16_777_216, 2)


class Training:
    """Steps under a runner, as the tuner would make them: a coming point is there *lag* steps after it was decided."""

    def __init__(self, runner, time_of, lag=2, cannot=lambda point: False):
        self.runner, self.time_of, self.lag, self.cannot = runner, time_of, lag, cannot
        self.point, self.number, self.coming = runner.decision.active, 0, None
        self.steps = []

    def step(self):
        used = self.point
        step_s = self.time_of(used)
        self.steps.append((used, step_s))
        decision = self.runner.decision
        if decision.number != self.number:
            self.number, self.point = decision.number, decision.active
            self.coming = (decision.coming, self.lag) if decision.coming is not None else None
        elif self.coming is not None:
            point, left = self.coming
            self.coming = (point, left - 1) if left > 1 else None
            if left == 1 and self.cannot(point):
                self.runner.failed(point)
            elif left == 1:
                self.point = point
        self.runner.observe(used, step_s)

    def run(self, n):
        for _ in range(n):
            self.step()
        return self


def bowl(point):
    return 1 + sum((a - b) ** 2 for a, b in zip(point.coordinates, (20, 22, 2))) * 0.02


def test_the_best_stays_within_the_budget():
    training = Training(TrialRunner(Search(), DEFAULT, DEFAULT), bowl).run(70)
    runner = training.runner
    assert runner.decision.is_last and runner.n_steps >= 60 and runner.decision.active == runner.best == training.point
    assert bowl(runner.best) == min(trial.step_s for trial in runner.trials) < bowl(DEFAULT)
    assert all(used == runner.best for used, _ in training.steps[62:])


def test_from_a_bad_start_the_defaults_come_first():
    training = Training(TrialRunner(Search(), BAD, DEFAULT), bowl).run(70)
    assert [trial.point for trial in training.runner.trials[:2]] == [BAD, DEFAULT]
    after = [step_s for used, step_s in training.steps if used != BAD]
    assert max(after) <= 2 * bowl(DEFAULT)


def test_steps_that_are_cold_or_follow_a_switch_do_not_count():
    runner = TrialRunner(Search(), BAD, DEFAULT)
    for step_s in [100.0] * N_COLD + [2.0] * N_MEASURED + [100.0] + [1.0] * N_MEASURED:
        runner.observe(runner.decision.coming or runner.decision.active, step_s)
    assert [trial.step_s for trial in runner.trials] == [2.0, 1.0]


def test_what_is_hopeless_is_over_after_one_step():
    slow = Training(TrialRunner(Search(), DEFAULT, DEFAULT), lambda point: 1.0 if point == DEFAULT else 3.0).run(30)
    tried = [trial for trial in slow.runner.trials if trial.point != DEFAULT]
    assert tried and all(trial.n_steps == 1 for trial in tried) and slow.runner.best == DEFAULT


def test_what_cannot_be_had_is_noted_and_left():
    runner = TrialRunner(Search(), DEFAULT, DEFAULT)
    training = Training(runner, bowl, cannot=lambda point: point.layout != DEFAULT.layout).run(70)
    refused = [trial for trial in training.runner.trials if trial.step_s is None]
    assert refused and training.runner.decision.is_last
    assert all(used.layout == DEFAULT.layout for used, _ in training.steps)


@pytest.mark.parametrize("stored", [BAD, DEFAULT])
def test_what_is_stored_is_used_and_nothing_tried(stored):
    training = Training(TrialRunner(Search(), DEFAULT, DEFAULT, stored), bowl).run(10)
    assert training.runner.decision.is_last and training.point == stored and not training.runner.trials
    assert {used for used, _ in training.steps} <= {DEFAULT, stored}


def test_a_stored_result_that_cannot_be_had_is_forgotten():
    training = Training(TrialRunner(Search(), DEFAULT, DEFAULT, BAD), bowl, cannot=lambda point: point == BAD).run(75)
    assert training.runner.decision.is_last and training.runner.trials[0].step_s is None
    assert training.runner.trials[1].point == DEFAULT and BAD not in {used for used, _ in training.steps}
