"""The inside of a machine as a graph: what it refuses, its JSON, the ways through it."""
from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.hardware.topology.graph import Link, LinkKind, Part, PartKind, Topology, from_json, to_json
from bpsfast.orchestration.errors import ConfigError

PCIE, NVLINK, SOCKETS = LinkKind.PCIE, LinkKind.NVLINK, LinkKind.SOCKETS
#: two sockets, a switch with two GPUs at the first, a card at the second; an NVLink beside the switch
SMALL = Topology(
    "small",
    (Part("socket0", PartKind.SOCKET, cpus="0-3"), Part("socket1", PartKind.SOCKET, cpus="4-7"),
     Part("switch0", PartKind.SWITCH, "0000:02:00.0"),
     Part("gpu0", PartKind.GPU, "0000:04:00.0", "Tesla V100", device="0"),
     Part("gpu1", PartKind.GPU), Part("nic0", PartKind.NIC, wire_rate_bytes=12.5e9, device="mlx5_0")),
    (Link("socket0", "socket1", SOCKETS, 38.4e9), Link("socket0", "switch0", PCIE, 15e9),
     Link("switch0", "gpu0", PCIE, 14e9), Link("gpu1", "switch0", PCIE, 13e9), Link("socket1", "nic0", PCIE, 12e9),
     Link("gpu0", "gpu1", NVLINK, 50e9, 2)))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Return any machine: some parts of any kind, any links between them that a topology allows."""
    texts = st.text(max_size=5)
    rates = st.floats(1.0, 1e15)
    names = draw(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=8, unique=True))
    parts = [Part(name, draw(st.sampled_from(PartKind)), draw(texts), draw(texts), draw(texts),
                  draw(st.floats(0.0, 1e15)), draw(st.floats(0.0, 1e15)), draw(texts)) for name in names]
    pairs = [(pair, kind) for pair in itertools.combinations(names, 2) for kind in LinkKind]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    links = [Link(*draw(st.permutations(pair)), kind, draw(rates), draw(st.integers(1, 18))) for pair, kind in chosen]
    return Topology(draw(texts), tuple(parts), tuple(links))


@settings(deadline=None)
@given(topologies())
def test_json_gives_back_the_same_machine(topology: Topology) -> None:
    assert from_json(to_json(topology)) == topology


@settings(deadline=None)
@given(topologies(), st.data())
def test_a_path_leads_from_one_part_to_the_other(topology: Topology, data: st.DataObject) -> None:
    ends = st.sampled_from([part.name for part in topology.parts])
    begin, end = data.draw(ends), data.draw(ends)
    kinds = data.draw(st.sets(st.sampled_from(LinkKind)))
    links = topology.path(begin, end, *kinds)
    assert links == topology.path(begin, end, *sorted(kinds, key=str))
    place = begin
    for number, link in enumerate(links):
        assert link.kind in (kinds or {PCIE, SOCKETS}) and place in (link.a, link.b)
        assert number == 0 or topology.part(place).kind not in (PartKind.GPU, PartKind.NIC)
        place = link.b if place == link.a else link.a
    assert not links or place == end
    assert (len(links), _slowest(links)) == _best(topology, begin, end, kinds or {PCIE, SOCKETS})


def _slowest(links: tuple[Link, ...]) -> float:
    return min((link.rate_bytes for link in links), default=float("inf"))


def _best(topology: Topology, begin: str, end: str, kinds: set[LinkKind]) -> tuple[int, float]:
    """Return length and slowest rate of the best path by looking at all of them, in the order of their length."""
    ways: list[tuple[str, frozenset[str], float]] = [(begin, frozenset({begin}), float("inf"))]
    for length in range(len(topology.parts)):
        rates = [rate for place, _, rate in ways if place == end]
        if rates:
            return length, max(rates)
        ways = [(other, seen | {other}, min(rate, link.rate_bytes)) for place, seen, rate in ways
                if place == begin or topology.part(place).kind not in (PartKind.GPU, PartKind.NIC)
                for other, link in topology.neighbours(place, *kinds) if other not in seen]
        # of ways to the same place the fastest is enough: what was seen on the way is nearer to the beginning anyway
        ways = [max((way for way in ways if way[0] == place), key=lambda way: way[2]) for place in {w[0] for w in ways}]
    return 0, float("inf")


def test_ways_through_a_small_machine() -> None:
    assert [link.rate_bytes for link in SMALL.path("gpu0", "nic0")] == [14e9, 15e9, 38.4e9, 12e9]
    assert [link.rate_bytes for link in SMALL.path("gpu0", "gpu1")] == [14e9, 13e9]
    assert SMALL.path("gpu0", "gpu1", NVLINK)[0].n_links == 2
    assert SMALL.path("gpu0", "nic0", NVLINK) == () and SMALL.path("gpu0", "gpu0") == ()


def test_of_paths_of_the_same_length_the_faster_one_is_taken() -> None:
    parts = tuple(Part(name, PartKind.SWITCH) for name in "abcd")
    links = (Link("a", "b", PCIE, 1.0), Link("b", "d", PCIE, 9.0), Link("a", "c", PCIE, 2.0), Link("c", "d", PCIE, 3.0))
    assert Topology("square", parts, links).path("a", "d") == (links[2], links[3])
    even = (*links[:3], Link("c", "d", PCIE, 1.0), Link("a", "d", NVLINK, 9.0))
    assert Topology("even", parts, even).path("a", "d") == (even[0], even[1])


def test_parts_and_neighbours() -> None:
    assert [part.name for part in SMALL.of(PartKind.GPU)] == ["gpu0", "gpu1"] and SMALL.of(PartKind.NVSWITCH) == ()
    assert SMALL.part("nic0").device == "mlx5_0"
    assert [name for name, _ in SMALL.neighbours("gpu0")] == ["switch0", "gpu1"]
    assert [name for name, _ in SMALL.neighbours("gpu0", NVLINK)] == ["gpu1"]
    with pytest.raises(KeyError, match="gpu2"):
        SMALL.part("gpu2")


@pytest.mark.parametrize(("change", "words"), [
    ({"parts": [{"name": "a", "kind": "gpu"}, {"name": "a", "kind": "nic"}]}, "machine m: two parts are named a"),
    ({"links": [{"a": "a", "b": "c", "kind": "pcie", "rate_bytes": 1}]}, "from a to c, but no part is named c"),
    ({"links": [{"a": "a", "b": "b", "kind": "pcie", "rate_bytes": 0}]}, "of 0 bytes/s.*must differ.*more than 0"),
    ({"links": [{"a": "a", "b": "b", "kind": "pcie", "rate_bytes": -1}]}, "of -1 bytes/s"),
    ({"links": [{"a": "a", "b": "b", "kind": "nvlink", "rate_bytes": 1, "n_links": 0}]}, "0 in one.*number be more"),
    ({"links": [{"a": "a", "b": "a", "kind": "pcie", "rate_bytes": 1}]}, "from a to a.*ends must differ"),
    ({"links": [{"a": "a", "b": "b", "kind": "pcie", "rate_bytes": 1}, {"a": "b", "b": "a", "kind": "pcie",
                                                                        "rate_bytes": 2}]},
     "two pcie links between b and a; add their rates up in one"),
    ({"parts": [{"name": "a", "kind": "socket", "memory_rate_bytes": -1}]}, "a has a rate of -1 bytes/s"),
    ({"parts": [{"name": "a", "kind": "tpu"}]}, r"does not describe a machine: Invalid enum value 'tpu'.*\$.parts"),
    ({"links": [{"a": "a", "b": "b", "kind": "pcie", "rate_bytes": "fast"}]}, r"Expected `float`, got `str`.*links"),
    ({"links": [{"a": "a", "b": "b", "kind": "pcie"}]}, "missing required field `rate_bytes`"),
    ({"name": 7}, r"Expected `str`, got `int`.*\$.name"),
])
def test_what_is_no_machine_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    text = json.dumps({"name": "m", "parts": [{"name": "a", "kind": "gpu"}, {"name": "b", "kind": "gpu"}],
                       "links": []} | change)
    with pytest.raises(ConfigError, match=words):
        from_json(text)


@pytest.mark.parametrize("text", ["", "{", "[]", b'{"name": "\xff"}', '{"x": ' + "[" * 100_000])
def test_what_is_no_json_is_refused_in_words(text: str | bytes) -> None:
    with pytest.raises(ConfigError, match=r"not JSON|not describe a machine"):
        from_json(text)


@pytest.mark.parametrize("rate", [float("inf"), float("nan"), 0.0])
def test_a_rate_is_a_finite_number(rate: float) -> None:
    with pytest.raises(ConfigError, match="its rate and number be more than 0"):
        Topology("m", SMALL.parts, (Link("gpu0", "gpu1", NVLINK, rate),))
