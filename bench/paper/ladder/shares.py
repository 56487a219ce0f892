"""The variants of `bench ladder`, and a model's partitions: their owners, addresses and contents at both ends."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import bpsfast.bench.paper.ladder.exchange as exchange
from bpsfast.bench.harness.pattern import Array
from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.planner.catalog import MODELS, n_elements

PAGE = 4096
#: Offset of an unaligned partition from the page: a multiple of an element's size, but not of a cache line.
SHIFT = 52
#: Name of a list of one partition of 8 bytes, whose round trip is twice the latency.
PROBE = "8 bytes"

_MIN_PARTITION_NBYTES = 4096
_FACTOR = 2654435761  # Knuth's: consecutive products differ in every byte


@dataclass(frozen=True)
class Model:
    """One gradient list. Tensors and the largest partition have 1 / *divisor* of their size, so the number of messages
    is that of the whole list."""

    name: str
    divisor: int = 1

    def __str__(self) -> str:
        return self.name if self.divisor == 1 else f"{self.name}/{self.divisor}"


@dataclass(frozen=True)
class Part:
    """One partition: its bytes, and whether the other host sums it (else the worker's own machine)."""

    nbytes: int
    remote: bool


def parse_models(text: str, divisors: dict[str, int]) -> list[Model]:
    """Return the models of ``vgg19,resnet50/4``; *divisors* are used for names without a number.

    Raises `ConfigError` if a name is unknown or a divisor is not a positive number.
    """
    found = []
    for word in filter(None, map(str.strip, text.split(","))):
        name, slash, number = word.partition("/")
        if name not in MODELS or (slash and not (number.isdecimal() and int(number) > 0)):
            raise ConfigError(f"models: {word!r}: expected {', '.join(MODELS)}, each with an optional divisor, "
                              "as vgg19/8")
        found.append(Model(name, int(number) if slash else divisors.get(name, 1)))
    if not found:
        raise ConfigError(f"models: {text!r} names none; there are {', '.join(MODELS)}")
    return found


def parts_of(model: Model, partition_nbytes: int) -> list[Part]:
    """Return the partitions of a float32 list in order; the owner with fewer bytes so far gets the next one."""
    if model.name == PROBE:
        return [Part(8, True)]
    limit = max(_MIN_PARTITION_NBYTES, partition_nbytes // model.divisor)
    parts, sums = [], {True: 0, False: 0}
    for n in n_elements(model.name):
        left = 4 * max(1, n // model.divisor)
        n_parts = -(-left // limit)
        even = -(-left // (4 * n_parts)) * 4
        while left > 0:
            nbytes = min(even, left)
            remote = sums[True] <= sums[False]
            sums[remote] += nbytes
            parts.append(Part(nbytes, remote))
            left -= nbytes
    return parts


def offsets(parts: Sequence[Part]) -> tuple[list[int], int]:
    """Return the offset of each partition, page-aligned with room for `SHIFT`, and the total size."""
    found, at = [], 0
    for part in parts:
        found.append(at)
        at += -(-(part.nbytes + SHIFT) // PAGE) * PAGE
    return found, at


def pattern(begin: int, nbytes: int) -> Array:
    """Return *nbytes* of the worker's memory from byte *begin* on (both multiples of 4)."""
    return np.arange(begin // 4, (begin + nbytes) // 4, dtype=np.uint32) * np.uint32(_FACTOR & 0xFFFFFFFF)


@dataclass(frozen=True)
class LadderVariant:
    """One way to move a list. `switches` are those of `WriteExchange`.

    `own_by_wire`: the share that the worker's own machine sums goes through the NIC's loopback (tcp: the kernel's)
    instead of shared memory. `unaligned`: no partition begins at a page or cache line.
    """

    name: str
    about: str
    switches: int = 0
    own_by_wire: bool = False
    unaligned: bool = False
    is_tcp: bool = False


OURS = LadderVariant("ours", "registered and addressed once, in place, page-aligned, one SGE, both directions at once")
VANILLA = LadderVariant("vanilla", "all of the above taken back",
                        exchange.REGISTER | exchange.RENDEZVOUS | exchange.COPY
                        | exchange.TWO_SGES | exchange.HALF_DUPLEX, own_by_wire=True, unaligned=True)
TCP = LadderVariant("tcp", "plain sockets, the own share through the loopback interface", own_by_wire=True, is_tcp=True)

VARIANTS = (
    OURS,
    LadderVariant("register per step", "each write's source is registered before it, deregistered after it",
                  exchange.REGISTER),
    LadderVariant("rendezvous per step", "the receiver is asked for address and key before each write",
                  exchange.RENDEZVOUS),
    LadderVariant("memcpy at both ends", "through staging buffers at sender and receiver", exchange.COPY),
    LadderVariant("loopback through NIC", "the own share goes through the device, not shared memory", own_by_wire=True),
    LadderVariant("unaligned", "partitions begin 52 bytes behind a page's begin", unaligned=True),
    LadderVariant("two SGEs", "the first 16 bytes of each write are an SGE of their own", exchange.TWO_SGES),
    LadderVariant("no concurrent TX", "no result is sent before the whole push has arrived", exchange.HALF_DUPLEX),
    VANILLA,
    TCP,
    LadderVariant("tcp, shared memory", "the same, but the own share stays in shared memory", is_tcp=True),
)
BY_NAME = {variant.name: variant for variant in VARIANTS}
