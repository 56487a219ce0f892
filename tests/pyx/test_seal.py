"""Seals: AES-256-GCM as NIST has it; every record opens once, whole, in its turn, and nothing else does."""
from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.pyx import seal
from bpsfast.pyx.seal import KEY_NBYTES, RECORD_NBYTES, TAG_NBYTES, Seal

KEY = bytes(range(KEY_NBYTES))
LENGTHS = st.one_of(st.integers(0, 100), st.sampled_from([4095, 4096, 4097, RECORD_NBYTES - 1, RECORD_NBYTES]))


def ends(key: bytes = KEY) -> tuple[Seal, Seal]:
    return Seal(key, closes=True), Seal(key, closes=False)


def test_it_is_aes_256_gcm_with_the_number_of_the_record_as_its_nonce():
    """Test case 14 of the GCM specification: a key, a nonce and a plain text of zeros."""
    record = Seal(bytes(32), closes=True).close(bytes(16))
    assert record.hex() == "cea7403d4d606b6e074ec5d3baf39d18" "d0d1c8a799996bf0265b98b5d48ab919"


@settings(max_examples=100, deadline=None)
@given(st.lists(LENGTHS, max_size=8), st.randoms(use_true_random=False))
def test_what_is_closed_is_opened_whatever_its_length(lengths, random):
    ours, theirs = ends(random.randbytes(KEY_NBYTES))
    for nbytes in lengths:
        plain = random.randbytes(nbytes)
        record = ours.close(plain)
        assert len(record) == nbytes + TAG_NBYTES and (nbytes < 8 or plain not in record)
        assert theirs.open(record) == plain


def test_equal_texts_have_different_records():
    ours, _ = ends()
    assert len({ours.close(bytes(100)) for _ in range(300)}) == 300, "256 and more: of all bytes of the number"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 200), st.data())
def test_a_record_with_any_bit_changed_does_not_open(nbytes, data):
    ours, theirs = ends()
    record = bytearray(ours.close(bytes(nbytes)))
    record[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match="has not sealed"):
        theirs.open(record)


@pytest.mark.parametrize("spoil", [
    lambda records: [records[0], records[0]], lambda records: [records[1]], lambda records: [records[1], records[0]],
    lambda records: [records[0], records[2]], lambda records: [records[0][:-1]], lambda records: [records[0] + b"\0"],
    lambda records: [records[0][1:]], lambda records: [records[0][TAG_NBYTES:]],
], ids=["repeated", "first missing", "exchanged", "one missing", "cut", "longer", "cut in front", "without its end"])
def test_a_record_opens_in_its_turn_only(spoil):
    ours, theirs = ends()
    spoilt = spoil([ours.close(bytes([number]) * 64) for number in range(3)])
    with pytest.raises(ValueError, match="not next"):
        for record in spoilt:
            theirs.open(record)


def test_after_one_failure_nothing_opens_any_more():
    ours, theirs = ends()
    records = [ours.close(b"text") for _ in range(3)]
    with pytest.raises(ValueError, match="not next"):
        theirs.open(bytes(20))
    for record in records[1:]:  # the next in number first: it would open if the failure had only been counted
        with pytest.raises(ValueError, match="not next"):
            theirs.open(record)


def test_another_key_opens_nothing():
    ours, _ = ends()
    with pytest.raises(ValueError, match="has not sealed"):
        Seal(bytes(32), closes=False).open(ours.close(b"text"))


@pytest.mark.parametrize("nbytes", [0, 16, 31, 33])
def test_a_key_has_32_bytes(nbytes):
    with pytest.raises(ValueError, match=f"32 bytes, not {nbytes}"):
        Seal(bytes(nbytes), closes=True)


def test_what_is_too_long_or_too_short_is_refused_and_so_is_the_wrong_way():
    ours, theirs = ends()
    with pytest.raises(ValueError, match="at most 65536"):
        ours.close(bytes(RECORD_NBYTES + 1))
    for nbytes in (0, TAG_NBYTES - 1, RECORD_NBYTES + TAG_NBYTES + 1):
        with pytest.raises(ValueError, match="16 to 65536 more"):
            theirs.open(bytes(nbytes))
    with pytest.raises(ValueError, match="a seal that closes"):
        theirs.close(b"text")
    with pytest.raises(ValueError, match="a seal that opens"):
        ours.open(bytes(20))
    assert theirs.open(ours.close(b"text")) == b"text", "none of that counts"


def test_without_the_library_it_says_what_is_missing_of_which():
    program = """
from bpsfast.pyx import seal
seal._LIBRARIES = (b"libnobodyhas.so.7", b"libc.so.6")
for attempt in (seal.load, lambda: seal.Seal(bytes(32), closes=True)):
    try:
        attempt()
    except OSError as exc:
        print(exc)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    words = "libnobodyhas.so.7: not found; libc.so.6: EVP_CIPHER_CTX_new not in it"
    assert done.stdout.splitlines() == [words] * 2, done.stderr


def test_loading_again_finds_it_again():
    seal.load()
    seal.load()
