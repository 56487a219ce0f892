"""NUMA nodes and lists of cores."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from bpsfast.base.value_formats import format_cpus, is_cpu_list, parse_cpus
from tests.sysfs_trees.machine import Machine


@pytest.mark.parametrize(("text", "cpus"), [
    ("0-3,8,10-11", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("", set()), (" 1 , 3 \n", {1, 3}), ("x", set()),
    ("3-1", set()), ("0-99999,7", {7}), ("0-99999999999", set())])
def test_lists_of_cores(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize(("text", "is_list"), [
    ("0-3,8", True), (" 5 ", True), ("", False), ("3-1", False), ("1,,2", False), ("1:2", False), ("-1", False),
    ("65536", False), ("1-2-3", False)])
def test_what_is_a_list(text: str, is_list: bool) -> None:
    assert is_cpu_list(text) is is_list


@pytest.mark.parametrize("text", ["0-3,8,10-11", "5", "", "1-2"])
def test_lists_of_cores_as_they_are_written(text: str) -> None:
    assert format_cpus(parse_cpus(text)) == text


def test_nodes_with_cores_and_distances(recorded_machine: Callable[[str], Machine]) -> None:
    host = recorded_machine("mlx5_roce").host
    assert {number: node.distances for number, node in host.numa.items()} == {0: {0: 10, 1: 21}, 1: {0: 21, 1: 10}}
    assert 47 in host.numa[0].cpus and 16 in host.numa[1].cpus
    assert host.own_numa == {0} and recorded_machine("infiniband").host.own_numa == {0, 1}


def test_distances_are_of_the_nodes_that_there_are_not_of_their_positions(
        recorded_machine: Callable[[str], Machine]) -> None:
    machine = recorded_machine("none").remove("sys/devices/system/node")
    for number, cpus, distance in ((0, "0-3", "10 40 80"), (8, "4-7", "40 10 80"), (252, "", "80 80 10")):
        machine.write(f"sys/devices/system/node/node{number}/cpulist", cpus)
        machine.write(f"sys/devices/system/node/node{number}/distance", distance)
    nodes = machine.host.numa
    assert nodes[8].distances == {0: 40, 8: 10, 252: 80}
    machine.remove("sys/devices/system/node/node8")
    assert machine.host.numa[0].distances == {}, "nobody knows which of the three is of node 252"


def test_a_kernel_without_nodes_has_none(recorded_machine: Callable[[str], Machine]) -> None:
    host = recorded_machine("none").remove("sys/devices/system").host
    assert host.numa == {} and host.own_numa == frozenset()
