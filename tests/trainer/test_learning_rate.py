"""Learning rates that go with pushes."""
from __future__ import annotations

import numpy as np
import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.trainer.arguments import checked_learning_rate


@pytest.mark.parametrize(("rate", "told"), [(0.5, 0.5), (np.float32(2), 2.0), (3, 3.0), (0, None), (None, None)])
def test_what_nodes_are_told(rate, told):
    assert checked_learning_rate(rate) == told


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), "fast", [0.1, 0.2]])
def test_what_is_no_rate(rate):
    with pytest.raises(ConfigError, match=r"learning_rate=.*: expected a number that is not negative"):
        checked_learning_rate(rate)
