"""Decisions on notices: found by whoever looks, before or after; bounded; who has not published one is named."""
from __future__ import annotations

from hypothesis import given, settings, strategies as st

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.job import key_value_store
from tests.support.job_table import welcomed


def publish(rank, key="k", value=b"v", question=1):
    return m.Publish(rank=rank, question=question, key=key, value=value)


def look(rank, key="k", who="rank 3", question=2, timeout_s=5.0):
    return m.Lookup(rank=rank, question=question, key=key, timeout_s=timeout_s, who=who)


def test_found_before_and_after():
    table = welcomed()
    table.say(b"A", look(0))
    assert not table.got(b"A", m.KeyValueReply)
    table.say(b"B", publish(3))
    assert table.got(b"A", m.KeyValueReply) == [m.KeyValueReply(rank=0, question=2, value=b"v")]
    assert table.got(b"B", m.KeyValueReply) == [m.KeyValueReply(rank=3, question=1)]
    table.say(b"B", look(2, question=9), publish(3, value=b"w"), look(2, question=10))
    replies = [(each.question, each.value) for each in table.got(b"B", m.KeyValueReply)]
    assert replies == [(9, b"v"), (1, b""), (10, b"w")]


def test_a_key_belongs_to_one_rank():
    table = welcomed()
    table.say(b"B", publish(3))
    table.got(b"B", m.KeyValueReply)
    table.say(b"A", publish(1, value=b"other"), look(1))
    refused, found = table.got(b"A", m.KeyValueReply)
    assert refused.error == "MismatchError" and "rank 1 publishes what rank 3 (node 1, host b)" in refused.reason
    assert found.value == b"v"
    table.say(b"B", m.Withdraw(rank=3, prefix="k"))
    table.say(b"A", publish(1, value=b"other"))
    assert table.got(b"A", m.KeyValueReply) == [m.KeyValueReply(rank=1, question=1)]


def test_withdrawing_takes_only_what_begins_so():
    table = welcomed()
    table.say(b"A", publish(0, "post:0"), publish(0, "other"), publish(1, "post:1"))
    table.say(b"A", m.Withdraw(rank=0, prefix="post:"))
    table.got(b"A", m.KeyValueReply)
    table.say(b"A", look(0, "post:0"), look(0, "other"), look(0, "post:1"))
    assert len(table.got(b"A", m.KeyValueReply)) == 2


def test_time_up_names_who_is_missing():
    table = welcomed()
    table.say(b"A", look(0, who="rank 3", timeout_s=1.5), look(1, who="the launcher", timeout_s=9))
    table.tick(1.4)
    assert not table.got(b"A", m.KeyValueReply)
    table.tick(1.5)
    [found] = table.got(b"A", m.KeyValueReply)
    assert found.error == "StallError"
    assert found.reason == ("rank 0 waited 1.5 s for notice 'k': rank 3 (node 1, host b) has not published it")
    table.tick(9.0)
    assert "the launcher has not published it" in table.got(b"A", m.KeyValueReply)[0].reason


def test_who_has_left_is_not_waited_for():
    table = welcomed()
    table.say(b"B", publish(3, "kept"))
    table.say(b"A", look(0), look(1, who="rank 2"))
    table.say(b"B", m.RankLeft(rank=3))
    [found] = table.got(b"A", m.KeyValueReply)
    assert found.error == "StallError"
    assert "in vain: rank 3 (node 1, host b) is lost or has called shutdown" in found.reason
    table.say(b"A", look(0, "late"), look(0, "kept"))
    late, kept = table.got(b"A", m.KeyValueReply)
    assert "in vain" in late.reason and kept.value == b"v"


def test_questions_of_who_has_left_are_forgotten():
    table = welcomed()
    table.say(b"A", look(0))
    table.say(b"A", m.RankLeft(rank=0))
    table.say(b"B", publish(3))
    assert not table.got(b"A", m.KeyValueReply)


def test_only_so_much_is_kept_of_a_rank():
    table = welcomed()
    nbytes = key_value_store.VALUE_MAX_NBYTES
    n_fit = key_value_store.RANK_MAX_NBYTES // (nbytes + 2)
    table.say(b"A", *(publish(0, f"{number:02}", bytes(nbytes)) for number in range(n_fit + 1)))
    *taken, refused = table.got(b"A", m.KeyValueReply)
    assert not any(each.error for each in taken)
    assert refused.error == "CapacityError" and f"at most {key_value_store.RANK_MAX_NBYTES} are kept" in refused.reason
    table.say(b"A", publish(0, "00", bytes(nbytes)), publish(1, "mine", bytes(nbytes)))
    assert not any(each.error for each in table.got(b"A", m.KeyValueReply))
    table.say(b"A", publish(0, "long", bytes(nbytes + 1)), publish(0, ""))
    assert [each.error for each in table.got(b"A", m.KeyValueReply)] == ["CapacityError", "ConfigError"]


def test_only_so_many_questions_of_a_rank_wait(monkeypatch):
    monkeypatch.setattr(key_value_store, "RANK_MAX_QUESTIONS", 3)
    table = welcomed()
    table.say(b"A", *(look(0, f"{number}") for number in range(4)), look(1, "mine"))
    [refused] = table.got(b"A", m.KeyValueReply)
    assert refused.error == "CapacityError" and "3 of its questions wait already" in refused.reason
    table.say(b"B", publish(3, "2"))
    assert table.got(b"A", m.KeyValueReply)[0].value == b"v"
    table.say(b"A", look(0, "again"), look(0, "x" * 257))
    assert [each.error for each in table.got(b"A", m.KeyValueReply)] == ["ConfigError"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["publish", "withdraw", "lookup"]), st.integers(0, 3), st.sampled_from("ab")),
                max_size=30))
def test_every_question_gets_the_value_that_a_table_would_give(steps):
    table, held, waiting = welcomed(), {}, []
    for number, (step, rank, key) in enumerate(steps):
        sender = b"A" if rank < 2 else b"B"
        if step == "publish":
            table.say(sender, publish(rank, key, b"%d" % number, number))
            [own, *answers] = table.got(b"A", m.KeyValueReply) + table.got(b"B", m.KeyValueReply) if rank < 2 else (
                table.got(b"B", m.KeyValueReply) + table.got(b"A", m.KeyValueReply))
            everybody = {(each.question, each.value, each.error) for each in (own, *answers)}
            if held.get(key, (rank,))[0] != rank:
                assert everybody == {(number, b"", "MismatchError")}
                continue
            held[key] = rank, b"%d" % number
            due = [asked for asked, wanted in waiting if wanted == key]
            waiting = [each for each in waiting if each[1] != key]
            assert everybody == {(number, b"", "")} | {(asked, held[key][1], "") for asked in due}
        elif step == "withdraw":
            table.say(sender, m.Withdraw(rank=rank, prefix=key))
            if held.get(key, (None,))[0] == rank:
                del held[key]
        else:
            table.say(sender, look(rank, key, who="anybody", question=number))
            found = table.got(sender, m.KeyValueReply)
            assert [each.value for each in found] == ([held[key][1]] if key in held else [])
            waiting += [] if found else [(number, key)]
