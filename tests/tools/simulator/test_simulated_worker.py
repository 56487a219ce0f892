"""A simulated worker waits for what it needs and for nothing else."""
from __future__ import annotations

import pytest

from bpsfast.tools.simulator.network import Clock
from bpsfast.tools.simulator.simulation import Worker
from bpsfast.tools.simulator.workload import Layer

LAYERS = (Layer("a", 1.0, 2.0, ()), Layer("b", 1.0, 2.0, ()))


def began(cross_barrier: bool, sums_take: tuple[float, float], optimizer_s: float = 0.0) -> list[float]:
    """Run three steps; the sum of layer i takes sums_take[i] from when its gradient is made."""
    clock = Clock()
    worker = Worker(clock, 0, LAYERS, [[0], [1]], 3, cross_barrier,
                    lambda _, layer: clock.at(clock.now + sums_take[layer], worker.unit_done, layer), optimizer_s)
    clock.at(0.0, worker.begin)
    clock.run()
    return worker.began_s


@pytest.mark.parametrize(("cross_barrier", "sums_take", "expected"), [
    (False, (0.0, 0.0), [0, 6, 12, 18]),    # sums cost nothing
    (False, (1.0, 0.0), [0, 7, 14, 21]),    # the last gradient made is waited for
    (False, (0.0, 5.0), [0, 9, 18, 27]),    # the first one too: made at 4, there at 9
    (True, (0.0, 3.0), [0, 6, 12, 19]),     # there at 7, when its layer's forward begins; the last is waited for
    (True, (0.0, 5.0), [0, 6, 14, 25]),     # there at 9, so that forward b ends at 10 and backward a at 14
])
def test_steps_begin_when_the_sums_they_need_are_there(cross_barrier: bool, sums_take: tuple[float, float],
                                                       expected: list[float]) -> None:
    assert began(cross_barrier, sums_take) == pytest.approx(expected)


def test_an_optimizer_adds_its_time_to_every_step() -> None:
    assert began(False, (0.0, 0.0), 0.5) == pytest.approx([0, 6.5, 13, 19.5])
