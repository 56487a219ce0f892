"""Whatever reads a peer's bytes, for a moment each, from the seeds on and unguided: `make fuzz` does it at length."""
from __future__ import annotations

import signal
import subprocess

import numpy as np
import pytest

from bpsfast.node.transport import shm
from bpsfast.node.transport.rdma import rdma_messages
from bpsfast.orchestration import messages, security
from bpsfast.orchestration.errors import ProtocolError
from tests.support import fuzz_seeds, fuzzing, sanitized
from tests.support.fuzzed_frames import damage
from tests.support.fuzzed_parsers import PARSERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def fuzzed(seconds, name, folder, *headers):
    """Run a program of `fuzzing` on its seeds, and what comes of them by damage, for so long."""
    try:
        program = sanitized.fuzz_program(name, folder, *headers)
    except sanitized.Unavailable as exc:
        pytest.skip(str(exc))
    seeds = folder / "seeds"
    seeds.mkdir()
    fuzz_seeds.write(name, seeds)
    return subprocess.run([program, str(seconds), seeds], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", fuzzing.PROGRAMS)
def test_no_native_parser_reads_or_writes_beyond_its_memory(name, tmp_path):
    done = fuzzed(2, name, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 100


@pytest.mark.parametrize(("header", "right", "wrong", "name"), [
    ("wire.h", "nbytes >= BPS_FRAME_HEADER && nbytes <= room", "nbytes >= BPS_FRAME_HEADER && room > 0", "slots"),
    ("rows.h", "n_rows > shape->max_rows || ", "", "rows"),
    ("core.h", "nbytes > room || input->offset > room - nbytes", "nbytes > room", "engine"),
    ("lane.h", "lane->entries[tail & (capacity - 1)]", "lane->entries[tail & capacity]", "memory"),
    ("seal.h", "(BPS_SEAL_RECORD + 64u + 2u * BPS_SEAL_TAG)", "64u", "sealed"),
], ids=["a frame longer than its slot", "more rows than there is room for", "an offset beyond", "an index beyond",
        "a record longer than what holds it"])
def test_a_hole_made_on_purpose_is_found(header, right, wrong, name, tmp_path):
    done = fuzzed(10, name, tmp_path, sanitized.spoilt_headers(tmp_path, header, right, wrong))
    assert done.returncode != 0 and ("Sanitizer" in done.stderr or "runtime error" in done.stderr), done.stderr


@pytest.mark.parametrize(("header", "right", "wrong", "name"), [
    ("seal.h", "DecryptFinal_ex(seal->context, out + n, &rest) == 1",
     "DecryptFinal_ex(seal->context, out + n, &rest) >= 0", "sealed"),
    ("seal.h", "seal->n_records++;", "", "sealed"),
    ("write_in.h", "write->crc != bps_crc32c(0, &write->header, sizeof write->header, 0)", "0", "sealed"),
    ("write_in.h", "write->tail != write->crc ? EBADMSG : ", "", "sealed"),
    ("slots.h", "header->round != slot->next_round", "0", "slots"),
], ids=["a seal whose tag nobody looks at", "a seal whose records have no number", "a header's checksum",
        "a payload's checksum", "a round"])
def test_a_check_that_is_left_out_is_missed(header, right, wrong, name, tmp_path):
    """What does not fit then arrives: changed, twice, or as another round's."""
    done = fuzzed(10, name, tmp_path, sanitized.spoilt_headers(tmp_path, header, right, wrong))
    assert done.returncode == -signal.SIGABRT, done.stderr


@pytest.mark.parametrize("name", PARSERS)
def test_no_parser_in_python_fails_otherwise_than_in_words(name, tmp_path):
    rng = np.random.default_rng(7)
    for seed in fuzz_seeds.write(name, tmp_path):
        PARSERS[name](seed)
        for _ in range(20):
            PARSERS[name](damage(seed, rng)[:2048])


@pytest.mark.parametrize("decode", [lambda data: messages.decode(data, "node"), shm.decode, rdma_messages.decode,
                                    lambda data: security._hello(data, "a peer")])
@pytest.mark.parametrize("data", [b"\x81\xa4type\xa2\xff\xff", b"\x91" * 5000, b"", b"\xc1"],
                         ids=["no text", "nested", "nothing", "no MessagePack"])
def test_what_is_no_message_is_refused(decode, data):
    with pytest.raises(ProtocolError):
        decode(data)
