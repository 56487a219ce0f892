"""What the ranks of a set tell each other about what they execute (`negotiation`), over the lines of `turn_line`."""
from __future__ import annotations

import msgspec

from .group_channel import (
    Failed as Failed,
    FollowerChannel as FollowerChannel,
    Hello as Hello,
    LeaderChannel as LeaderChannel,
    Left as Left,
)
from .negotiation import Request, Response


class Requests(msgspec.Struct, tag=True, frozen=True):
    """Another rank: what it asks for."""

    requests: tuple[Request, ...]


class Responses(msgspec.Struct, tag=True, frozen=True):
    """The first rank: what all execute next, in this order."""

    responses: tuple[Response, ...]


Message = Hello | Requests | Responses | Failed | Left
_decoder = msgspec.msgpack.Decoder(Message)


def listen(key: bytes, host: str) -> LeaderChannel:
    """Return the first rank's end, for those who connect to *host*; raises as `LeaderChannel`."""
    return LeaderChannel(key, host, _decoder)


def connect(host: str, port: int, key: bytes, leader: str) -> FollowerChannel:
    """Return another rank's end; *leader* and errors as `FollowerChannel`."""
    return FollowerChannel(host, port, key, _decoder, leader)
