"""A queue pair to a peer that this machine has no device for; with devices it is in the guest's suite_doctor."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.doctor.trial import Trial
from bpsfast.nic.route import choose
from bpsfast.pyx import verbs
from tests.sysfs_trees.machine import Machine


def test_a_device_that_is_not_there_is_an_error_with_its_name_and_leaves_nothing_open(
        recorded_machine: Callable[[str], Machine], no_leaks: None) -> None:
    [rail] = choose(recorded_machine("mlx5_roce").host, devices="=mlx5_1").rails
    if "mlx5_1" in verbs.devices():
        pytest.skip("this machine has an mlx5_1 of its own")
    with pytest.raises(OSError, match="mlx5_1"):
        Trial(verbs, rail)
