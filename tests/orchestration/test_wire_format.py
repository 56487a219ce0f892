"""What travels between two machines is written down: who changes it without a new `VERSION` hears of it here.

Two builds that call themselves the same version must understand each other. That another version is refused is tested
where connections are made: test_scheduler, test_node, test_reception.
"""
from __future__ import annotations

import re
from pathlib import Path

import msgspec

from bpsfast.node.transport.rdma import rdma_messages  # whose messages stand there
from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.messages import VERSION, Message, Record
from bpsfast.orchestration.store import StoreSpec

HEADER = Path(__file__).resolve().parents[2] / "pyx" / "wire.h"


MODULES = (Message.__module__, rdma_messages.__name__)  # tests and benches have messages of their own


def family(root):
    for kind in root.__subclasses__():
        if kind.__module__ in MODULES:
            yield kind
        yield from family(kind)


def spelled(kind):
    """Return a type as its annotation says it, without modules."""
    return re.sub(r"\b(?:typing|bpsfast|msgspec)[\w.]*\.|<class '(?:[\w.]*\.)?(\w+)'>", r"\1", str(kind))


def lines(kind):
    config = kind.__struct_config__
    tag = f"tag {config.tag!r}" if config.tag else "record"
    yield f"{kind.__name__} {tag}{', array' if config.array_like else ''}"
    for field in msgspec.structs.fields(kind):
        default = "made" if field.default is msgspec.NODEFAULT else repr(field.default)
        yield f"    {field.encode_name}: {spelled(field.type)}{'' if field.required else ' = ' + default}"


def test_the_format_is_that_of_its_version(golden):
    kinds = {kind.__name__: kind for root in (Message, Record) for kind in family(root)}
    kinds |= {kind.__name__: kind for kind in (CodecSpec, StoreSpec)}
    text = [f"VERSION {VERSION}", ""]
    for name in sorted(kinds):
        text += [*lines(kinds[name]), ""]
    source = HEADER.read_text()
    text += ["header of payloads", *source.partition("\n *\n")[2].partition("\n *\n")[0].splitlines(),
             re.search(r"struct bps_header \{[^}]*\}", source)[0]]
    golden(f"wire_{VERSION}.txt", "\n".join(text) + "\n")


def test_only_one_version_is_written_down():
    """The file of the version before is taken away with the change that made a new one."""
    assert [path.name for path in (Path(__file__).parents[1] / "golden").glob("wire_*.txt")] == [f"wire_{VERSION}.txt"]
