"""How an RDMA stream hands writes to its queue pair: `tests/native/rdma_writes.c`, which fails if it does otherwise."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sanitized


def test_writes_that_wait_go_in_chains_and_the_first_refused_one_fails_the_stream(tmp_path: Path) -> None:
    done = sanitized.run_program("rdma_writes", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("right", "wrong"), [
    ("chain[n - 1].next = &chain[n];", ";"),
    ("(rc == 0 || bad != &chain[i])", "1"),
    ("bad = chain;\n        for", "(void)0;\n        for"),
    ("at + 1 == stream->posted", "0"),
    ("stream->sent - stream->delivered), n = 0;", "stream->sent - stream->delivered) + 1, n = 0;"),
], ids=["no chain", "all count as sent", "one that is not named", "the last one asks for nothing", "one too many"])
def test_a_rule_spoilt_on_purpose_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    headers = sanitized.spoilt_headers(tmp_path, "rdma_writes.h", right, wrong)
    done = sanitized.run_program("rdma_writes", tmp_path, headers)
    assert "Assertion" in done.stderr
