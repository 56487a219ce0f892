"""What `bpsfast explain` knows, and what it says to what it does not know."""
from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bpsfast.cli import cli
from bpsfast.commands import explanations
from bpsfast.doctor import errnos
from bpsfast.doctor.checks import CHECKS
from bpsfast.orchestration.errors import ConfigError
from bpsfast.verbs import completions


def heads(text: str) -> list[str]:
    return [each.head for each in explanations.explain(text)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.code)
def test_every_check_is_explained_with_cause_and_commands(check) -> None:
    [found] = explanations.explain(check.code.lower())
    assert found.head == f"{check.code} {check.title}"
    labels = [label for label, _ in found.lines]
    assert {"symptom", "cause", "why", "seen in"} < set(labels) and len(labels) > 4


@pytest.mark.parametrize("name", explanations.known())
def test_every_name_is_explained(name: str) -> None:
    assert explanations.explain(name)


@pytest.mark.parametrize(("text", "expected"), [
    ("IBV_WC_WR_FLUSH_ERR", ["completion status 5: IBV_WC_WR_FLUSH_ERR"]),
    ("12/129", ["completion status 12, vendor error 129 (0x81): IBV_WC_RETRY_EXC_ERR"]),
    ("12/0x81", ["completion status 12, vendor error 129 (0x81): IBV_WC_RETRY_EXC_ERR"]),
    ("12", ["completion status 12: IBV_WC_RETRY_EXC_ERR", "errno 12: ENOMEM (Cannot allocate memory)"]),
    ("129", ["completion status 12, vendor error 129 (0x81): IBV_WC_RETRY_EXC_ERR"]),
    ("0x88", ["completion status 10, vendor error 136 (0x88): IBV_WC_REM_ACCESS_ERR"]),
    ("status 13", ["completion status 13: IBV_WC_RNR_RETRY_EXC_ERR"]),
    ("errno 110", ["errno 110: ETIMEDOUT (Connection timed out)"]),
    ("einval", ["errno 22: EINVAL (Invalid argument)"]),
    ("exit 3", ["exit code 3 of bpsfast"]),
    ("exit 137", ["exit code 137 of bpsfast"]),
    ("exit 255", ["exit code 255 of bpsfast"]),
    ("CapacityError", ["bpsfast's error CapacityError"]),
    ("bpsfast.PeerLostError", ["bpsfast's error PeerLostError"]),
])
def test_codes(text: str, expected: list[str]) -> None:
    assert heads(text) == expected


@pytest.mark.parametrize(("line", "expected"), [
    ("NCCL WARN NET/IB : Got completion from peer 10.0.0.9 with status=12 opcode=0 len=0 vendor err 129 (Recv)",
     "completion status 12, vendor error 129 (0x81): IBV_WC_RETRY_EXC_ERR"),
    ("Got completion with error 4, opcode 1, len 21938, vendor err 81",
     "completion status 4, vendor error 81 (0x51): IBV_WC_LOC_PROT_ERR"),
    ("poll: status IBV_WC_REM_ACCESS_ERR vendor_err 0x88",
     "completion status 10, vendor error 136 (0x88): IBV_WC_REM_ACCESS_ERR"),
    ("RuntimeError: ibv_reg_mr failed: Cannot allocate memory", "errno 12: ENOMEM (Cannot allocate memory)"),
    ("OSError: [Errno 22] ibv_modify_qp", "errno 22: EINVAL (Invalid argument)"),
    ("bpsfast: StallError: node 1 did not answer", "bpsfast's error StallError"),
    ("perftest says: No IB devices found", "RD03 verbs provider"),
    ("transport retry count exceeded on mlx5_0:1/RoCE", "RD09 loss and congestion"),
])
def test_pasted_lines(line: str, expected: str) -> None:
    assert expected in heads(line)


@pytest.mark.parametrize(("text", "words"), [
    ("RD29", "did you mean RD2"), ("RETRY_EXCEEDED", "did you mean IBV_WC_RETRY_EXC_ERR?"),
    ("ETIMEOUT", "did you mean ETIMEDOUT?"), ("CapacityErr", "did you mean CapacityError?"),
    ("nonsense", "it takes RD01 to RD22"), ("999999", "it takes RD01"),
])
def test_what_is_unknown_gets_a_proposal(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explanations.explain(text)
    assert words in str(caught.value)


def test_every_errno_has_advice_and_the_library_s_words() -> None:
    assert len(errnos.every()) > 15
    for words in errnos.every():
        assert words.name.startswith("E") and words.text and words.means and words.advice
    assert errnos.explain(0) is None and errnos.explain(4711) is None


def test_every_status_is_found_by_its_number() -> None:
    for status in completions.NAMES:
        assert any(head.startswith(f"completion status {status}: ") for head in heads(f"status {status}"))


def test_the_command_prints_text_json_and_exit_codes() -> None:
    done = CliRunner().invoke(cli, ["explain", "exit", "3"])
    assert done.exit_code == 0 and done.output.startswith("exit code 3 of bpsfast\n  means:    the machine lacks")
    done = CliRunner().invoke(cli, ["explain", "--json", "RD05"])
    assert json.loads(done.output)[0]["head"] == "RD05 GID"
    done = CliRunner().invoke(cli, ["explain", "ETIMEOUT"])
    assert done.exit_code == 2 and "did you mean ETIMEDOUT?" in done.output
    assert CliRunner().invoke(cli, ["explain"]).exit_code == 2
