"""Plans of perf: defaults, what contradicts, and what two sides have to agree on."""
from __future__ import annotations

import pytest

from bpsfast.orchestration.errors import ConfigError, MismatchError
from bpsfast.tools.perf import perf_plan as plans


def test_defaults_are_perftest_s():
    bandwidth, latency = plans.make("bw", {}), plans.make("lat", {})
    assert (bandwidth.sizes, bandwidth.iterations) == ((65536,), 5000)
    assert (bandwidth.depth, bandwidth.receive_depth) == (128, 512)
    assert bandwidth.operation == latency.operation == "write_imm"
    assert latency.iterations == 1000
    assert plans.make("bw", {"transport": "tcp"}).depth == 16


@pytest.mark.parametrize(("nbytes", "given", "moderation"), [
    (2, {}, 100), (8191, {}, 100), (8192, {}, 1), (2, {"depth": 20}, 20), (65536, {"moderation": 4}, 4),
])
def test_moderation_depends_on_the_size_unless_it_was_given(nbytes, given, moderation):
    assert plans.make("bw", given).moderation_at(nbytes) == moderation


@pytest.mark.parametrize(("verb", "given", "words"), [
    ("bw", {"sizes": (0,)}, "-s 0"),
    ("bw", {"sizes": (plans.LARGEST_NBYTES + 1,)}, "1 to 1073741824"),
    ("bw", {"moderation": 200}, "-Q must be at most -t"),
    ("bw", {"mtu": 1500}, "256, 512, 1024, 2048, 4096"),
    ("bw", {"transport": "tcp", "operation": "read"}, "tcp has one operation"),
    ("bw", {"transport": "shm", "events": True, "mtu": 1024}, "-m, -e requires --transport rdma"),
    ("bw", {"transport": "shm", "both_ways": True}, "one direction"),
    ("lat", {"duration_s": 1.0}, "use -n"),
    ("lat", {"pairs": 2}, "one message at a time"),
    ("lat", {"operation": "write", "events": True}, "use --op write_imm"),
    ("bw", {"pairs": 5000}, "-q"),
])
def test_what_cannot_be_is_refused_with_the_option_s_name(verb, given, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        plans.make(verb, given)


def test_a_server_without_options_takes_every_plan():
    plans.agree(plans.make("bw", {"sizes": (4,), "pairs": 3}), {"verb": "bw"})


def test_a_contradiction_names_option_and_both_values():
    proposed = plans.make("bw", {"sizes": (4,), "pairs": 3, "operation": "write"})
    with pytest.raises(MismatchError) as caught:
        plans.agree(proposed, {"verb": "bw", "pairs": 3, "operation": "read", "sizes": plans.ALL_SIZES})
    text = str(caught.value)
    assert "--op: write at the client, read here" in text
    assert "-s/-a: 4 at the client, 2,4...8388608 here" in text
    assert "-q" not in text


def test_bw_does_not_meet_lat():
    with pytest.raises(MismatchError, match="verb: lat at the client, bw here"):
        plans.agree(plans.make("lat", {}), {"verb": "bw"})
