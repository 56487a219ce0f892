"""Long lists are sent once: who is asked, what is held meanwhile, and that each node's messages keep their order."""
from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration import long_lists, messages as m
from bpsfast.orchestration.errors import ProtocolError
from bpsfast.orchestration.long_lists import LongLists, as_sent, pieces, with_digest
from tests.support.job_table import spec

N = long_lists.MOST_INLINE + 1


def tensors(prefix, n=N):
    return tuple(spec(f"{prefix}{i}") for i in range(n))


def declare(rank, prefix="a", n=N):
    return with_digest(m.Declare(rank=rank, tensors=tensors(prefix, n)))


def answer(lists, sender, message, now=0.0):
    """Let *sender* send the list of *message*; return what can be acted on, and what is asked."""
    ready, out = [], []
    for piece in pieces(message.digest, message.tensors):
        found, asked = lists.receive(now, sender, m.decode(m.encode(piece), "node"))
        ready += found
        out += asked
    return ready, out


def test_a_short_list_is_sent_as_it_is():
    message = declare(0, n=long_lists.MOST_INLINE)
    assert message.digest == b"" and as_sent(message) is message
    assert LongLists().receive(0.0, b"A", message) == ([(b"A", message)], [])


def test_a_long_list_is_asked_of_one_node_and_is_the_same_object_for_all():
    lists, first, second = LongLists(), declare(0), declare(1)
    assert as_sent(first).tensors == () and len(m.encode(as_sent(first))) < 60
    assert lists.receive(0.0, b"A", as_sent(first)) == ([], [(b"A", m.ListWanted(digest=first.digest))])
    assert lists.receive(0.0, b"B", as_sent(second)) == ([], [])
    ready, out = answer(lists, b"A", first)
    assert ready == [(b"A", first), (b"B", second)] and out == []
    assert ready[0][1].tensors is ready[1][1].tensors
    ready, out = lists.receive(0.0, b"C", as_sent(declare(2)))
    assert ready == [(b"C", declare(2))] and out == []


def test_a_list_travels_in_pieces_of_bounded_size():
    message = declare(0, n=20_000)
    sent = [m.encode(piece) for piece in pieces(message.digest, message.tensors)]
    assert len(sent) > 2 and max(map(len, sent)) < 300_000
    assert [m.decode(each, "node").is_last for each in sent] == [False] * (len(sent) - 1) + [True]


def test_units_travel_as_tensors_do():
    units = tuple(m.UnitPlan(unit=i, name=f"u{i}", dtype="int8", average=True, priority=0, nbytes=1, stride=64,
                             members=(), parts=()) for i in range(N))
    lists, message = LongLists(), with_digest(m.CommittedUnits(units=units))
    assert lists.receive(0.0, b"A", as_sent(message))[1] == [(b"A", m.ListWanted(digest=message.digest))]
    for piece in pieces(message.digest, units):
        ready, _ = lists.receive(0.0, b"A", piece)
    assert ready == [(b"A", message)]


def test_what_follows_is_held_and_heartbeats_are_not():
    lists, message = LongLists(), declare(0)
    beat, left = m.Heartbeat(sequence=1), m.RankLeft(rank=0)
    lists.receive(0.0, b"A", as_sent(message))
    assert lists.receive(0.0, b"A", left) == ([], [])
    assert lists.receive(0.0, b"A", beat) == ([(b"A", beat)], [])
    assert lists.receive(0.0, b"B", left) == ([(b"B", left)], [])
    assert answer(lists, b"A", message)[0] == [(b"A", message), (b"A", left)]


def test_another_node_is_asked_if_the_connection_ends():
    lists, message = LongLists(), declare(0)
    lists.receive(0.0, b"A", as_sent(message))
    lists.receive(0.0, b"B", as_sent(declare(1)))
    first, *_ = pieces(message.digest, message.tensors)
    assert lists.forget(0.0, b"A") == [(b"B", m.ListWanted(digest=message.digest))]
    assert lists.receive(0.0, b"A", first) == ([], []), "it was not asked any more"
    assert answer(lists, b"B", message)[0] == [(b"B", declare(1))]
    assert lists.forget(0.0, b"B") == []


def test_another_node_is_asked_after_a_while_and_either_answer_counts():
    for sender in (b"A", b"B"):
        lists, message = LongLists(), declare(0)
        lists.receive(0.0, b"A", as_sent(message))
        lists.receive(0.0, b"B", as_sent(declare(1)))
        assert lists.tick(1.9) == []
        assert lists.tick(2.0) == [(b"B", m.ListWanted(digest=message.digest))]
        assert lists.tick(2.1) == [] and lists.tick(9.0) == [], "both nodes were asked already"
        assert answer(lists, sender, message)[0] == [(b"A", message), (b"B", declare(1))]
        assert lists.tick(99.0) == []


def test_a_node_that_lacks_the_list_has_its_message_dropped():
    """The names have failed, or are committed, meanwhile: the node needs no answer any more."""
    lists, message, left = LongLists(), declare(0), m.RankLeft(rank=0)
    lists.receive(0.0, b"A", as_sent(message))
    lists.receive(0.0, b"A", left)
    lists.receive(0.0, b"B", as_sent(declare(1)))
    (nothing,) = pieces(message.digest, ())
    assert lists.receive(0.0, b"A", nothing) == ([(b"A", left)], [(b"B", m.ListWanted(digest=message.digest))])
    assert answer(lists, b"B", message)[0] == [(b"B", declare(1))]


@pytest.mark.parametrize("wrong", [tensors("b"), tensors("a")[:-1], tensors("a") + tensors("b")])
def test_a_list_that_is_another_one_is_refused(wrong):
    lists, message = LongLists(), declare(0)
    lists.receive(0.0, b"A", as_sent(message))
    with pytest.raises(ProtocolError, match="not the one of its Declare"):
        for piece in pieces(message.digest, wrong):
            lists.receive(0.0, b"A", piece)


def test_entries_that_cannot_be_read_are_refused():
    lists = LongLists()
    message = with_digest(m.CommittedUnits(units=tensors("a")))
    lists.receive(0.0, b"A", as_sent(message))
    with pytest.raises(ProtocolError, match="cannot be read"):
        for piece in pieces(message.digest, message.units):
            lists.receive(0.0, b"A", piece)


def test_the_lists_that_were_not_used_for_longest_are_forgotten(monkeypatch):
    monkeypatch.setattr(long_lists, "_MOST_KEPT", 2 * N)
    lists = LongLists()
    for prefix in "ab":
        lists.receive(0.0, b"A", as_sent(declare(0, prefix)))
        answer(lists, b"A", declare(0, prefix))
    assert lists.receive(0.0, b"A", as_sent(declare(1, "a")))[1] == [], "it is known, and was used last"
    lists.receive(0.0, b"A", as_sent(declare(0, "c")))
    answer(lists, b"A", declare(0, "c"))
    assert lists.receive(0.0, b"A", as_sent(declare(2, "a")))[1] == []
    assert lists.receive(0.0, b"A", as_sent(declare(2, "b")))[1] != []


def test_a_list_that_is_forgotten_while_a_message_is_held_is_waited_for(monkeypatch):
    monkeypatch.setattr(long_lists, "_MOST_KEPT", 2 * N)
    lists = LongLists()
    lists.receive(0.0, b"A", as_sent(declare(0, "a")))
    answer(lists, b"A", declare(0, "a"))
    lists.receive(0.0, b"A", as_sent(declare(0, "x")))
    assert lists.receive(0.0, b"A", as_sent(declare(1, "a"))) == ([], []), "held behind the other, its list is known"
    for prefix in "bc":
        lists.receive(0.0, b"B", as_sent(declare(2, prefix)))
        answer(lists, b"B", declare(2, prefix))
    assert lists.receive(0.0, b"B", as_sent(declare(2, "a")))[1] != [], "it is forgotten"
    assert answer(lists, b"A", declare(0, "x")) == ([(b"A", declare(0, "x"))], [])
    assert answer(lists, b"B", declare(2, "a"))[0] == [(b"B", declare(2, "a")), (b"A", declare(1, "a"))]
    assert lists.senders == []


@settings(deadline=None)
@given(st.data())
def test_each_nodes_messages_arrive_whole_and_in_order(data):
    """Nodes send lists and other things, answer questions at any time, and lose connections, in any order."""
    n_nodes = data.draw(st.integers(1, 4), "nodes")
    said = {b"%d" % i: deque(data.draw(st.lists(st.sampled_from("abcx"), max_size=6), f"what {i} says"))
            for i in range(n_nodes)}
    lists, sent, questions, seen = LongLists(), {each: [] for each in said}, {each: deque() for each in said}, {}
    now = 0.0

    def post(found):
        ready, out = found
        for sender, message in ready:
            seen.setdefault(sender, []).append(message)
        for sender, question in out:
            questions[sender].append(question.digest)

    def answer_one(sender):
        digest = questions[sender].popleft()
        held = next((each.tensors for each in sent[sender] if getattr(each, "digest", b"") == digest), ())
        for piece in pieces(digest, held):
            post(lists.receive(now, sender, piece))

    while any(said.values()):
        kind = data.draw(st.sampled_from(["say", "answer", "tick", "end"]))
        sender = data.draw(st.sampled_from(sorted(sent)))
        now += 1.0
        if kind == "say" and said[sender]:
            what = said[sender].popleft()
            message = m.RankLeft(rank=len(sent[sender])) if what == "x" else declare(len(sent[sender]), what)
            sent[sender].append(message)
            post(lists.receive(now, sender, as_sent(message)))
        elif kind == "answer" and questions[sender]:
            answer_one(sender)
        elif kind == "tick":
            post(([], lists.tick(now)))
        elif kind == "end" and len(sent) > 1:
            for each in (sent, questions, said, seen):
                each.pop(sender, None)
            post(([], lists.forget(now, sender)))
    while any(questions.values()):
        answer_one(next(sender for sender, asked in questions.items() if asked))
    assert {sender: messages for sender, messages in seen.items() if messages} == {
        sender: messages for sender, messages in sent.items() if messages}
    assert not lists._held and not lists._questions


def test_a_stopped_node_costs_one_wait_however_many_lists_it_has_sent():
    lists = LongLists()
    prefixes = [f"p{i}." for i in range(20)]
    for sender in (b"H", b"A"):
        asked = [each for prefix in prefixes for each in lists.receive(0.0, sender, as_sent(declare(0, prefix)))[1]]
        assert len(asked) == (20 if sender == b"H" else 0), "all of the first one, at once"
    asked = lists.tick(2.0)
    assert {sender for sender, _ in asked} == {b"A"} and len(asked) == 20
    ready = [each for prefix in prefixes for each in answer(lists, b"A", declare(0, prefix), 2.1)[0]]
    assert [sender for sender, _ in ready].count(b"A") == 20
    other = declare(1, "other")
    lists.receive(3.0, b"H", as_sent(other))
    assert lists.receive(3.0, b"A", as_sent(other)) == ([], []), "one is asked"
    lists.forget(3.0, b"H")
    lists.receive(3.0, b"H", as_sent(declare(1, "more")))


def test_a_rejoin_replaces_what_its_node_has_sent_before():
    """It is said again, and must not keep the report waiting."""
    lists, message = LongLists(), declare(0)
    rejoin = m.Rejoin(version=1, package="", settings={}, job="j", index=0, nodes=())
    lists.receive(0.0, b"A", as_sent(message))
    lists.receive(0.0, b"B", as_sent(declare(1)))
    ready, out = lists.receive(0.0, b"A", rejoin)
    assert ready == [(b"A", rejoin)] and out == [(b"B", m.ListWanted(digest=message.digest))]
    lost = m.Lost(who="node 3", reason="why")
    assert lists.receive(0.0, b"A", as_sent(message)) == ([], [])
    assert lists.receive(0.0, b"A", lost) == ([(b"A", lost)], [])
    assert lists.receive(0.0, b"A", m.FinishAck()) == ([(b"A", m.FinishAck())], [])
    assert answer(lists, b"B", declare(1))[0] == [(b"B", declare(1)), (b"A", message)]


def test_a_digest_is_of_one_kind_of_list():
    lists, message = LongLists(), declare(0)
    lists.receive(0.0, b"A", as_sent(message))
    with pytest.raises(ProtocolError, match="CommittedUnits has the digest of a list of Declare"):
        lists.receive(0.0, b"B", m.CommittedUnits(digest=message.digest))
    answer(lists, b"A", message)
    assert lists.receive(0.0, b"C", m.CommittedUnits(digest=message.digest))[0] == [], "the list is one of tensors"


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(long_lists, "_MOST_HELD", 3)
    monkeypatch.setattr(long_lists, "_MOST_ENTRIES", N - 1)
    lists, message = LongLists(), declare(0)
    lists.receive(0.0, b"A", as_sent(message))
    for _ in range(2):
        lists.receive(0.0, b"A", m.RankLeft(rank=0))
    with pytest.raises(ProtocolError, match="3 messages wait for a list"):
        lists.receive(0.0, b"A", m.RankLeft(rank=0))
    with pytest.raises(ProtocolError, match=f"more than {N - 1} entries"):
        answer(lists, b"A", message)


def test_lists_of_a_kind_are_forgotten_when_no_more_are_expected():
    lists = LongLists()
    lists.receive(0.0, b"A", as_sent(declare(0)))
    answer(lists, b"A", declare(0))
    lists.forget_lists(m.CommittedUnits)
    assert lists.receive(0.0, b"B", as_sent(declare(1)))[0] == [(b"B", declare(1))]
    lists.forget_lists(m.Declare)
    assert lists.receive(0.0, b"C", as_sent(declare(2)))[1] == [(b"C", m.ListWanted(digest=declare(2).digest))]
