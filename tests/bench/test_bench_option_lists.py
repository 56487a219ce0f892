"""Lists of names in options of benches."""
from __future__ import annotations

import pytest

from bpsfast.bench.harness.option_lists import parse_names
from bpsfast.orchestration.errors import ConfigError


def test_names_in_their_order() -> None:
    assert parse_names("--only", " b, a,", ("a", "b")) == ("b", "a")


@pytest.mark.parametrize(("text", "words"), [("a,c,d", "--only a,c,d: 'c' is none of a, b"), ("", "'' is none of a, b"),
                                             (" ,", "' ,' is none of a, b")])
def test_others_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_names("--only", text, ("a", "b"))
