"""The words for bad completions."""
from __future__ import annotations

import pytest

from bpsfast.hardware.verbs import completions


@pytest.mark.parametrize("status", range(24))
def test_every_status_of_the_header_has_all_its_words(status: int) -> None:
    words = completions.explain(status)
    assert words.status == status and words.name.startswith("IBV_WC_")
    assert words.happened and words.usually and words.advice.endswith(".")
    assert completions.by_name(words.name) == words


# the numbers of rdma-core's enum ibv_wc_status, which no version has changed
@pytest.mark.parametrize(("status", "name"), [
    (0, "SUCCESS"), (1, "LOC_LEN_ERR"), (4, "LOC_PROT_ERR"), (5, "WR_FLUSH_ERR"), (8, "LOC_ACCESS_ERR"),
    (9, "REM_INV_REQ_ERR"), (10, "REM_ACCESS_ERR"), (11, "REM_OP_ERR"), (12, "RETRY_EXC_ERR"),
    (13, "RNR_RETRY_EXC_ERR"), (16, "REM_ABORT_ERR"), (19, "FATAL_ERR"), (20, "RESP_TIMEOUT_ERR"),
    (21, "GENERAL_ERR"), (23, "TM_RNDV_INCOMPLETE"),
])
def test_number_and_name_are_the_header_s(status: int, name: str) -> None:
    assert completions.explain(status).name == f"IBV_WC_{name}"


def test_the_sentence_has_number_vendor_code_cause_and_advice() -> None:
    told = str(completions.explain(12, 129))
    assert told.startswith("IBV_WC_RETRY_EXC_ERR (12, vendor error 129 (0x81)): ")
    for words in ("acknowledge timer", "GID", "MTU", "4791", "bpsfast doctor --peer"):
        assert words in told
    assert "vendor" not in str(completions.explain(12))


def test_a_flushed_request_is_a_consequence() -> None:
    assert completions.explain(completions.WR_FLUSH_ERR, 0xF9).is_consequence
    assert "first" in completions.explain(completions.WR_FLUSH_ERR).advice
    assert not completions.explain(completions.RETRY_EXC_ERR).is_consequence


def test_a_vendor_code_counts_only_beside_the_status_it_was_seen_with() -> None:
    assert "NAK" in completions.explain(10, 0x88).vendor
    assert completions.explain(12, 0x88).vendor == ""
    assert completions.BY_VENDOR_ERROR[129] == 12 and completions.BY_VENDOR_ERROR[136] == 10


def test_an_unknown_status_still_has_words() -> None:
    words = completions.explain(99, 7)
    assert "99" in str(words) and "vendor error 7 (0x7)" in str(words) and "specification" in words.happened


@pytest.mark.parametrize("text", ["IBV_WC_RETRY_EXC_ERR", "retry_exc_err", "RETRY_EXC", " retry-exc-err "])
def test_names_are_found_however_they_are_written(text: str) -> None:
    found = completions.by_name(text)
    assert found is not None and found.status == 12


def test_a_name_that_is_none_is_not_found() -> None:
    assert completions.by_name("RETRY_EXCEEDED") is None
