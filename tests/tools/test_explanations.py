"""What `bpsfast explain` knows, and what it says to what it does not know."""
from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bpsfast.cli import cli
from bpsfast.hardware.verbs import completions
from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.commands import explain
from bpsfast.tools.doctor import error_texts
from bpsfast.tools.doctor.examination import CHECKS


def heads(text: str) -> list[str]:
    return [each.head for each in explain.explain(text)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.code)
def test_every_check_is_explained_with_cause_and_commands(check) -> None:
    [found] = explain.explain(check.code.lower())
    assert found.head == f"{check.code} {check.title}"
    labels = [label for label, _ in found.lines]
    assert {"symptom", "cause", "why", "seen in"} < set(labels) and len(labels) > 4


@pytest.mark.parametrize("name", explain.known())
def test_every_name_is_explained(name: str) -> None:
    assert explain.explain(name)


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


#: what is pasted, and the beginning of one head of what is found; of a message the words that were recognised
_LOGS = [
    # perftest
    ("Failed to modify QP 122273 to RTR", '"QP 122273 to RTR" (perftest'),
    ("2025-01-02T03:04:05.678Z gpu07 [rank 3] Failed to modify QP to RTR", '"QP to RTR" (perftest'),
    ("Failed to modify QP to INIT, ret=22", "errno 22: EINVAL"), ("Failed to modify QP 7 to RTS", '"QP 7 to RTS"'),
    (" Unable to Connect the HCA's through the link", "\"Unable to Connect the HCA's through the link\" (perftest)"),
    ("Unable to Connect the HCA\u2019s through the link", "\"Unable to Connect the HCA's"),
    (" Failed status 12: wr_id 0 syndrom 0x81", "completion status 12, vendor error 129 (0x81): IBV_WC_RETRY_EXC_ERR"),
    ("[1,0]<stderr>: Failed status 4: wr_id 0 syndrom 0x51", "completion status 4, vendor error 81"),
    ("Poll send CQ error status=12 qp 3", "completion status 12: "), ("cq completion failed status 5", "completion st"),
    (" Completion with error at client", '"Completion with error at" (perftest)'),
    ("ethernet_read_keys: Couldn't read remote address", '"ethernet_read_keys" (perftest'),
    ("Couldn't connect to 192.168.125.211:18515", '"Couldn\'t connect to 192.168.125.211:18515" (perftest'),
    ("Unable to open file descriptor for socket connection Unable to init the socket connection",
     '"Unable to open file'),
    (" Multiple QPs only available on bw tests", '"Multiple QPs only available"'),
    ("Couldn't allocate MR", '"Couldn\'t allocate MR"'), ("Couldn't create CQ", '"Couldn\'t create CQ"'),
    (" Unable to find the Infiniband/RoCE device", '"Unable to find the Infiniband/RoCE device"'),
    ("IB device mlx5_9 not found", '"IB device mlx5_9 not found"'), ("Device requires GRH", '"requires GRH"'),
    ("Couldn't get context for the device", '"Couldn\'t get context for"'),
    ("Failed to create MR", '"Failed to create MR"'), ("Couldn't listen to port 18515", '"Couldn\'t listen to port"'),
    (" Found Incompatibility issue with GID types.", '"Incompatibility issue with GID types"'),
    ("Received 10 times ADDR_ERROR", '"ADDR_ERROR" (librdmacm)'), ("Unexpected CM event bl blka 8", '"Unexpected CM'),
    ("RDMA CM event error:\nEvent: RDMA_CM_EVENT_REJECTED; error: -111.", '"RDMA_CM_EVENT_REJECTED" (librdmacm)'),
    # rdma-core
    ("Failed status transport retry counter exceeded (12) for wr_id 2", "completion status 12: "),
    ("Failed status Work Request Flushed Error (5) for wr_id 2", "completion status 5: "),
    ("libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.", '"RLIMIT_MEMLOCK"'),
    ("libibverbs: Warning: couldn't load driver 'libmana-rdmav34.so': cannot open", '"couldn\'t load driver'),
    ("libibverbs: Warning: no userspace device-specific driver found for /sys/class/infiniband_verbs/uverbs0", "RD03"),
    ("cma event RDMA_CM_EVENT_ADDR_ERROR, error -19", "errno 19: ENODEV"), ("No IB devices found", "RD03"),
    ("rdma_create_event_channel failed: No such file or directory", '"rdma_create_event_channel" (librdmacm)'),
    # the kernel
    ("[5365309.262528] mlx5_core 0000:3b:00.0: mlx5_cmd_out_err:810:(pid 9): CREATE_MKEY(0x200) op_mod(0x0) failed, "
     "status bad parameter(0x3), syndrome (0x35e6ec), err(-22)", "errno 22: EINVAL"),
    ("mlx5_cmd_check:810:(pid 923941): create_mkey(0x200) op_mod(0x0) failed, status bad parameter(0x3)",
     '"mlx5_cmd_check'),
    ("infiniband mlx5_0: create_mkey_callback:131:(pid 0): async reg mr failed. status -12", "errno 12: ENOMEM"),
    ("[ 4929.69] infiniband rocep33s0f0: mlx5_poll_one:530:(pid 0): syndrome 0x15, vendor syndrome 0x81",
     "completion status 12, vendor error 129"),
    ("infiniband mlx5_0: mlx5_handle_error_cqe:332:(pid 0): WC error: 4, Message: local protection error",
     "completion st"),
    ("[    5.1] mlx5_core 0000:3b:00.0: 31.504 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x4 link",
     '"availab'),
    ("mlx5_core 0000:0b:00.1: Port module event: module 1, Cable unplugged",
     '"Port module event: module 1, Cable unpl'),
    ("mlx5_core 0000:3b:00.0: poll_health:800:(pid 0): device's health compromised - reached miss count",
     '"poll_health"'),
    ("Nov 27 12:00:01 gpu01 kernel: rdma_rxe: qp#17 moved to error state", '"rdma_rxe: qp#17 moved to error state"'),
    ("DMAR: [DMA Read] Request device [3b:00.0] fault addr ffe1d000 [fault reason 06]", '"DMAR:" (kernel)'),
    ("ib0: multicast join failed for ff12:401b:ffff:0000:0000:0000:ffff:ffff, status -22", '"ib0: multicast join'),
    ("neighbour: arp_cache: neighbor table overflow!", '"arp_cache: neighbor table"'),
    ("modprobe: ERROR: could not insert 'nvidia_peermem': Invalid argument", '"nvidia_peermem" (kernel)'),
    ("mlx5_core 0000:3b:00.0: probe of 0000:3b:00.0 failed with error -12", "errno 12: ENOMEM"),
    ("mlx5_core 0000:3b:00.0: mlx5_load_one:1234:(pid 9): mlx5_function_setup failed with -110", "errno 110: ETIME"),
    ("[ 12.3] bnxt_en 0000:01:00.0: bnxt_re: Failed to register with netedev: 0xffffffea", '"bnxt_re: Fail" (kernel)'),
    ("Couldn't get local LID", '"Couldn\'t get local LID"'), ("Failed to deregister MR", '"Failed to deregister"'),
    ("ibv_alloc_dm failed", '"ibv_alloc_dm fail" (rdma-core'),
    # libraries above them
    ("[Handshake] Failed to modify QP to RTR, check mtu, gid, peer lid, peer qp num: Connection timed out [110]",
     "errno 110: ETIMEDOUT"),
    ("gpu01:77:99 [0] NCCL WARN Call to ibv_modify_qp failed with error Invalid argument", '"ibv_modify_qp failed'),
    ("gpu01:77:99 [0] NCCL INFO NET/IB : No device found.", '"NET/IB : No device found"'),
    ("UCX  ERROR ibv_create_cq(cqe=4096) failed: Cannot allocate memory : Please set max locked memory", "RD01"),
    ("Transport retry count exceeded on mlx5_0:1/RoCE (synd 0x15 vend 0x81 hw_synd 0/0)",
     "completion status 12, vendor"),
]


@pytest.mark.parametrize(("pasted", "head"), _LOGS, ids=range(len(_LOGS)))
@pytest.mark.parametrize("dressed", [
    "{}", "\x1b[31m{}\x1b[0m", "[  123.456789] {}\r\n", "[rank 1] 12:00:01 {}", "one line\n{}\nanother one",
])
def test_lines_of_logs_are_known_however_they_are_pasted(pasted, head, dressed) -> None:
    found = explain.explain(dressed.format(pasted))
    assert any(each.head.startswith(head) for each in found), [each.head for each in found]
    for each in found:
        assert str(each).count("\n") >= 2, "means something, and says what to do"


@pytest.mark.parametrize(("dump", "head"), [
    ("mlx5: node: got completion with error:\n00000000 00000000 00000000 00000000\n"
     "00000000 00000000 00000000 00000000\n00000001 00000000 00000000 00000000\n00000000 00008813 080000a5 0000aad2",
     "completion status 10, vendor error 136 (0x88): IBV_WC_REM_ACCESS_ERR"),
    ("[166755.33] infiniband mlx5_0: dump_cqe:272:(pid 0): dump error cqe\n"
     "[166755.33] 00000020: 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00\n"
     "[166755.33] 00000030: 00 00 00 00 0f 00 51 04 25 00 00 58 00 da ac d2\n",
     "completion status 4, vendor error 81 (0x51): IBV_WC_LOC_PROT_ERR"),
])
def test_a_dumped_completion_is_read(dump, head) -> None:
    assert heads(dump)[0] == head


def test_of_several_completions_the_flushed_ones_come_last() -> None:
    found = heads(" Completion with error at client\n Failed status 5: wr_id 0 syndrom 0xf9\n"
                  " Failed status 5: wr_id 1 syndrom 0xf9\n Failed status 12: wr_id 0 syndrom 0x81\nscnt=128, ccnt=0\n")
    assert [head.partition(",")[0] for head in found[:2]] == ["completion status 12", "completion status 5"]
    assert len(found) == 3


def test_a_line_that_the_terminal_has_wrapped_is_known() -> None:
    assert '"QP 122273 to RTR" (perftest, rdma-core, Mooncake)' in heads("Failed to modify QP\n   122273 to RTR")


@pytest.mark.parametrize("text", [
    "the moon is made of cheese", "epoch 12 status ok", "INFO: connected to 10.0.0.1", "error: file not there",
    "step 5: 129",
])
def test_other_lines_are_none_of_these(text) -> None:
    with pytest.raises(ConfigError, match="nothing is known"):
        explain.explain(text)


@pytest.mark.parametrize(("text", "words"), [
    ("RD29", "did you mean RD2"), ("RETRY_EXCEEDED", "did you mean IBV_WC_RETRY_EXC_ERR?"),
    ("ETIMEOUT", "did you mean ETIMEDOUT?"), ("CapacityErr", "did you mean CapacityError?"),
    ("nonsense", "it takes RD01 to RD22"), ("999999", "it takes RD01"),
])
def test_what_is_unknown_gets_a_proposal(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explain.explain(text)
    assert words in str(caught.value)


def test_every_errno_has_advice_and_the_library_s_words() -> None:
    assert len(error_texts.every()) > 15
    for words in error_texts.every():
        assert words.name.startswith("E") and words.text and words.means and words.advice
    assert error_texts.explain(0) is None and error_texts.explain(4711) is None


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
