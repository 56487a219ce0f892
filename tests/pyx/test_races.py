"""Data races: `tests/native/races` and our modules under ThreadSanitizer; one that is made on purpose is found."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import races, sanitized

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _sanitizer():
    try:
        sanitized.compiler("tsan")
    except sanitized.Unavailable as exc:
        pytest.skip(str(exc))


def find(run):
    """Return what *run* returns; skip where the sanitizer cannot start."""
    try:
        return run()
    except sanitized.Unavailable as exc:
        pytest.skip(str(exc))


@pytest.mark.parametrize("name", races.PROGRAMS)
def test_no_race_in(name: str, tmp_path: Path) -> None:
    program = sanitized.race_program(name, tmp_path)
    assert find(lambda: races.run_program(program, 1.0, tmp_path))


@pytest.mark.parametrize(("header", "right", "wrong", "name"), [
    ("futex.h", "__atomic_store_n(word, value, __ATOMIC_RELEASE)", "*word = value", "lane"),
    ("futex.h", "__atomic_store_n(word, value, __ATOMIC_RELEASE)", "__atomic_store_n(word, value, __ATOMIC_RELAXED)",
     "board"),
    ("futex.h", "__atomic_load_n(word, __ATOMIC_ACQUIRE)", "__atomic_load_n(word, __ATOMIC_RELAXED)", "lane"),
    ("events.h", "bps_store(&events->used, events->used + 1);", "events->used++;", "events"),
    ("workers.h", "    pthread_mutex_lock(&core->lock);\n    core->sums++;",
     "    core->sums++;\n    pthread_mutex_lock(&core->lock);", "engine"),
    ("direct.h", "__atomic_exchange_n(word, value, __ATOMIC_SEQ_CST);", "*word = value;", "direct"),
    ("direct.h", "bps_direct_publish(port, &channel->lines[port->me].reduced, number);\n    return BPS_DIRECT_DONE;\n}"
     "\n\n/* Copy the parts", "__atomic_store_n(&channel->lines[port->me].reduced, number, __ATOMIC_RELAXED);\n"
     "    return BPS_DIRECT_DONE;\n}\n\n/* Copy the parts", "direct"),
    ("tcp_stream.h", "        pthread_mutex_lock(&stream->lock);\n        bps_stream_sent(stream);\n"
     "        pthread_mutex_unlock(&stream->lock);\n", "        bps_stream_sent(stream);\n", "stream"),
], ids=["plain store", "relaxed store", "relaxed load", "plain count", "without the lock", "plain publication",
        "relaxed publication", "a queue without its lock"])
def test_a_race_made_on_purpose_is_found(header: str, right: str, wrong: str, name: str, tmp_path: Path) -> None:
    headers = sanitized.spoilt_headers(tmp_path, header, right, wrong)
    program = sanitized.race_program(name, tmp_path, "-Wno-error", headers=headers)
    with pytest.raises(AssertionError, match="data race"):
        find(lambda: races.run_program(program, 1.0, tmp_path, to_the_first=True))


@pytest.mark.thorough
def test_no_race_between_a_stream_or_an_engine_and_python(tmp_path: Path) -> None:
    find(lambda: races.build_modules(tmp_path))
    assert "passed" in find(lambda: races.run_tests(["test_tcp", "test_engine_lifecycle"], tmp_path, tmp_path, 250))
