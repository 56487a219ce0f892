"""NVML's answers, as they were written down, and the links that follow from them."""
from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import pytest

from bpsfast.hardware.topology import nvml
from bpsfast.hardware.topology.graph import Link, LinkKind, PartKind
from bpsfast.hardware.topology.nvml import Gpu, NvLinks, NvmlAnswer
from bpsfast.orchestration.errors import ConfigError

NAMES = {"a": "gpu0", "b": "gpu1", "c": "gpu2"}


def gpus(*links: list[NvLinks]) -> NvmlAnswer:
    """Return the answer of GPUs at a, b, c with *links*."""
    return NvmlAnswer(gpus=tuple(Gpu(number, "GPU", "abc"[number], tuple(each)) for number, each in enumerate(links)))


def to(remote: str, n_links: int = 1, version: int = 2, **fields: Any) -> NvLinks:
    return NvLinks(fields.pop("kind", "gpu"), remote, version, n_links, **fields)


def joined(answer: NvmlAnswer, names: dict[str, str] = NAMES) -> list[tuple[str, str, float, int]]:
    return [(link.a, link.b, link.rate_bytes, link.n_links) for link in nvml.nvlinks(answer, names)[1]]


def test_links_that_both_ends_tell_count_once() -> None:
    both = gpus([to("b", 2), to("c")], [to("a", 2)], [to("a")])
    assert joined(both) == [("gpu0", "gpu1", 50e9, 2), ("gpu0", "gpu2", 25e9, 1)]
    assert joined(gpus([], [to("a", 2)], [])) == [("gpu0", "gpu1", 50e9, 2)]
    assert joined(gpus([to("b", 2)], [])) == [("gpu0", "gpu1", 50e9, 2)]


@pytest.mark.parametrize(("version", "speed_mb", "rate_bytes"), [
    (1, 0, 20e9), (2, 25781, 25e9), (4, 14062, 14.062e9), (6, 26562, 25e9), (7, 0, 50e9), (99, 0, 50e9)])
def test_rates_by_version(version: int, speed_mb: int, rate_bytes: float) -> None:
    assert to("b", 3, version, speed_mb=speed_mb).rate_bytes == 3 * rate_bytes


def test_the_nvswitches_of_a_machine_are_one() -> None:
    each = [to("s", 5, 6, kind="switch"), to("t", 4, 6, kind="switch")]
    (switch,), links = nvml.nvlinks(gpus(each, each, each), NAMES)
    assert switch.kind is PartKind.NVSWITCH and switch.model == "2 NVSwitches"
    assert links == [Link(f"gpu{number}", "nvswitch0", LinkKind.NVLINK, 225e9, 9) for number in range(3)]
    # a virtual machine hides their addresses
    hidden = [to("", 12, 4, kind="switch")]
    assert nvml.nvlinks(gpus(hidden, hidden), NAMES)[0][0].model == "1 NVSwitch"


def test_links_to_what_is_not_there_are_left_out() -> None:
    answer = gpus([to("b"), to("x"), to("y", kind="cpu"), to("", kind="unknown"), to("a"), to("c", 0)], [to("a")])
    assert joined(answer) == [("gpu0", "gpu1", 25e9, 1)]
    assert joined(answer, {"b": "gpu0"}) == [] and joined(answer, {}) == []


def test_an_answer_is_read_as_it_is_written() -> None:
    answer = gpus([to("b", speed_mb=25781)], [])
    assert nvml.recorded_answer(json.loads(msgspec.json.encode(answer))) == answer
    assert nvml.recorded_answer(None).error == "not recorded"
    with pytest.raises(ConfigError, match=r"NVML said.*unknown field `gpu`"):
        nvml.recorded_answer({"gpu": []})


def test_a_machine_without_nvml_has_no_nvlinks_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bpsfast")
    answer = nvml.query_nvml()
    if answer.error:
        assert answer.gpus == () and [record.getMessage() for record in caplog.records] == [
            f"no NVLinks are known: {answer.error}"]
    else:
        assert answer.gpus and not caplog.records
    assert nvml.nvlinks(NvmlAnswer(answer.error), {}) == ([], [])
