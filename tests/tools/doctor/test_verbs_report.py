"""What libibverbs says about a machine: this one's, and as it is written down."""
from __future__ import annotations

import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.pyx import verbs
from bpsfast.tools.doctor import facts
from bpsfast.tools.doctor.facts import OpenedDevice


def test_this_machine_s_library_or_why_there_is_none() -> None:
    report = facts.ask_verbs()
    if report.error:
        assert "libibverbs" in report.error and not report.version and not report.devices
    else:
        assert report.version and report.fork and sorted(report.devices) == sorted(verbs.devices())
    assert report.provider == "native"


def test_an_implementation_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match="expected one of native, pyverbs"):
        facts.ask_verbs("other")


def test_a_report_that_was_written_down() -> None:
    report = facts.recorded_verbs({"provider": "native", "version": "44.0", "fork": "unneeded", "devices": {
        "rxe0": {"attributes": {"max_mr": 7}, "ports": {"1": {"active_mtu": 1024}}, "registered_nbytes": 5}}})
    assert report is not None
    expected = OpenedDevice(attributes={"max_mr": 7}, ports={1: {"active_mtu": 1024}}, registered_nbytes=5)
    assert report.devices["rxe0"] == expected
    assert facts.recorded_verbs(None) is None


@pytest.mark.parametrize("answer", ["text", {"version": "44.0"}, {"provider": "native", "devices": []}])
def test_what_is_no_report_is_refused(answer: object) -> None:
    with pytest.raises(ConfigError, match="recorded machine cannot be read"):
        facts.recorded_verbs(answer)
