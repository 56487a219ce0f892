"""When waits of the endpoint sleep at once."""
from __future__ import annotations

from bpsfast.collectives.p2p.progress_engine import CpuContention


def pause_ms(crowd: CpuContention, now: float) -> float:
    """Return how long nobody lingers after a slow yield that ended at *now*, in ms."""
    crowd.slow(now)
    return next(ms for ms in range(1000) if not crowd.is_there(now + ms / 1000 + 1e-6))


def test_at_first_nobody_is_there():
    assert not CpuContention().is_there(0.0)


def test_pauses_double_in_a_series_up_to_the_most():
    crowd = CpuContention()
    assert [pause_ms(crowd, now) for now in range(1, 10)] == [2, 4, 8, 16, 32, 64, 128, 128, 128]


def test_a_slow_yield_among_many_waits_met_awake_begins_a_new_series():
    crowd = CpuContention()
    pause_ms(crowd, 1)
    for _ in range(63):
        crowd.met()
    assert pause_ms(crowd, 2) == 4
    for _ in range(64):
        crowd.met()
    assert pause_ms(crowd, 3) == 2
