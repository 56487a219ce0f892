"""Control messages: every type survives the wire, nothing else is taken for one."""
from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration import messages
from bpsfast.orchestration.errors import ProtocolError

UNIONS = {"node": messages.NodeMessage, "scheduler": messages.SchedulerMessage, "local": messages.LocalMessage}
CASES = [(sender, kind) for sender, union in UNIONS.items() for kind in union.__args__]

_SCALARS = {
    "int": st.integers(-(2**63), 2**63 - 1), "str": st.text(max_size=20), "bytes": st.binary(max_size=20),
    "float": st.floats(allow_nan=False), "bool": st.booleans(),
    "raw": st.integers(0, 1 << 40).map(lambda number: msgspec.Raw(msgspec.msgpack.encode(number))),
}


def values(kind):
    """Values of one annotated type."""
    info = msgspec.inspect.type_info(kind)
    return _of(info)


def _of(info):
    inspect = msgspec.inspect
    if isinstance(info, inspect.StructType):
        return st.builds(info.cls, **{field.name: _of(field.type) for field in info.fields})
    if isinstance(info, inspect.VarTupleType):
        return st.lists(_of(info.item_type), max_size=3).map(tuple)
    if isinstance(info, inspect.TupleType):
        return st.tuples(*map(_of, info.item_types))
    if isinstance(info, inspect.DictType):
        return st.dictionaries(_of(info.key_type), _of(info.value_type), max_size=3)
    if isinstance(info, inspect.UnionType):
        return st.one_of(*map(_of, info.types))
    if isinstance(info, inspect.NoneType):
        return st.none()
    if isinstance(info, inspect.LiteralType):
        return st.sampled_from(info.values)
    return _SCALARS[type(info).__name__.removesuffix("Type").lower()]


@pytest.mark.parametrize(("sender", "kind"), CASES, ids=lambda value: getattr(value, "__name__", value))
@settings(deadline=None)
@given(data=st.data())
def test_every_message_survives_the_wire(sender, kind, data):
    message = data.draw(values(kind))
    assert messages.decode(messages.encode(message), sender) == message


@pytest.mark.parametrize("sender", ["node", "scheduler"])
def test_long_messages_travel_compressed(sender):
    long = (messages.Commit(generation=1, order=tuple(range(20_000))) if sender == "scheduler" else
            messages.Publish(rank=0, question=1, key="k", value=bytes(100_000)))
    data = messages.encode(long)
    sent = messages.compressed(data)
    assert len(sent) < len(data) and messages.decode(sent, sender) == long
    assert messages.compressed(data[:100]) == data[:100]
    for wrong in (sent[:-1], sent + b"x", sent[:1], sent[:1] + b"junk"):
        with pytest.raises(ProtocolError, match=f"from a {sender} are no control message"):
            messages.decode(wrong, sender)


def test_a_small_message_that_is_a_huge_one_is_refused(monkeypatch):
    monkeypatch.setitem(messages._MOST_NBYTES, "node", 1000)
    sent = messages.compressed(messages.encode(messages.Publish(rank=0, question=1, key="k", value=bytes(100_000))))
    with pytest.raises(ProtocolError, match="more than 1000 bytes uncompressed"):
        messages.decode(sent, "node")


def test_every_message_class_has_a_sender():
    kinds = {kind for kind in vars(messages).values()
             if isinstance(kind, type) and issubclass(kind, messages.Message) and kind is not messages.Message}
    assert kinds == {kind for _, kind in CASES}


@settings(deadline=None)
@given(st.binary(max_size=40), st.sampled_from(sorted(UNIONS)))
def test_other_bytes_are_a_protocol_error(data, sender):
    with pytest.raises(ProtocolError, match=f"{len(data)} bytes from a {sender} are no control message"):
        messages.decode(data, sender)


@pytest.mark.parametrize(("fields", "words"), [
    ({"type": "Nonsense"}, "Nonsense"),
    ({"sequence": 1}, "type"),
    ({"type": "Heartbeat"}, "sequence"),
    ({"type": "Heartbeat", "sequence": "1"}, r"\$\.sequence"),
])
def test_what_is_wrong_is_named(fields, words):
    with pytest.raises(ProtocolError, match=words):
        messages.decode(msgspec.msgpack.encode(fields), "node")


def test_a_role_cannot_speak_for_another():
    with pytest.raises(ProtocolError, match="Welcome"):
        messages.decode(messages.encode(messages.Welcome(index=0, epoch=1, nodes=())), "node")


def test_defaults_cost_no_bytes():
    bare = messages.TensorSpec(name="x", dtype="int8", shape=())
    assert set(msgspec.msgpack.decode(msgspec.msgpack.encode(bare))) == {"name", "dtype", "shape"}
