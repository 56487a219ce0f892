"""The plan of a ``bpsfast perf`` run: perftest's options and defaults, agreed by both sides.

The client proposes a plan. A server without options accepts it; a server with options refuses a plan that contradicts
them. Options of one side only (device, port, GID) are not part of the plan.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...hardware.verbs import PROVIDERS
from ...orchestration.errors import ConfigError, MismatchError

VERBS = ("bw", "lat")
TRANSPORTS = ("rdma", "tcp", "shm")
OPERATIONS = ("write_imm", "write", "send", "read")
MTUS = (256, 512, 1024, 2048, 4096)
#: Sizes of -a: 2 bytes to 8 MiB.
ALL_SIZES = tuple(1 << power for power in range(1, 24))
#: The length of a work request has 31 bits; two buffers of this size must fit into memory.
LARGEST_NBYTES = 1 << 30
_UNMODERATED_NBYTES = 8192

#: field -> its option, for errors
OPTIONS = {"operation": "--op", "transport": "--transport", "providers": "--verbs", "sizes": "-s/-a",
           "iterations": "-n", "duration_s": "-D", "depth": "-t", "receive_depth": "-r", "pairs": "-q",
           "both_ways": "-b", "mtu": "-m", "moderation": "-Q", "inline_nbytes": "-I", "events": "-e",
           "ack_timeout": "-u", "reversed": "--reversed", "traffic_class": "rdma_traffic_class",
           "service_level": "rdma_service_level", "relaxed_ordering": "rdma_relaxed_ordering",
           "huge_pages": "huge_pages", "cores": "rdma_cores"}
#: setting -> the field that it sets if no option does
SETTINGS = {"rdma_queue_pairs": "pairs", "rdma_queue_depth": "depth", "rdma_mtu": "mtu",
            "rdma_signal_every": "moderation", "rdma_inline_bytes": "inline_nbytes",
            "rdma_traffic_class": "traffic_class", "rdma_service_level": "service_level",
            "rdma_relaxed_ordering": "relaxed_ordering", "rdma_cores": "cores"}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run, with all defaults filled in.

    `duration_s` 0: run by iterations. `mtu` 0: the smaller one of both ports. `moderation` 0: by message size.
    `inline_nbytes` -1: the best for latency that the device allows. `ack_timeout`: resend after 4.096 us *
    2**ack_timeout. `reversed`: the server sends. The last fields are like the settings of the same names, on both
    sides.
    """

    verb: str
    transport: str = "rdma"
    operation: str = "write_imm"
    providers: tuple[str, ...] = ("native",)
    sizes: tuple[int, ...] = (65536,)
    iterations: int = 5000
    duration_s: float = 0.0
    depth: int = 128
    receive_depth: int = 512
    pairs: int = 1
    both_ways: bool = False
    mtu: int = 0
    moderation: int = 0
    inline_nbytes: int = -1
    events: bool = False
    ack_timeout: int = 14
    timeout_s: float = 30.0
    reversed: bool = False
    traffic_class: int = 0
    service_level: int = 0
    relaxed_ordering: bool = False
    huge_pages: bool = False
    cores: str = ""

    @property
    def largest_nbytes(self) -> int:
        """Size of the largest message."""
        return max(self.sizes)

    @property
    def two_sided(self) -> bool:
        """Whether the operation consumes a receive request of the peer."""
        return self.operation in ("write_imm", "send")

    @property
    def n_warmup(self) -> int:
        """Number of warm-up rounds of a latency run."""
        return min(100, max(1, self.iterations // 10))

    def moderation_at(self, nbytes: int) -> int:
        """Return N, a completion for every N sends, as perftest has it: 1 for large messages, 100 for small ones."""
        if self.verb == "lat":
            return min(self.depth, 16)
        return min(self.depth, self.moderation or (100 if nbytes < _UNMODERATED_NBYTES else 1))


def make(verb: str, given: Mapping[str, Any]) -> Plan:
    """Return the plan for *verb* with the options *given* (fields of `Plan`) and defaults; errors as in `check`."""
    transport = given.get("transport", "rdma")
    defaults: dict[str, Any] = {"depth": 128 if transport == "rdma" else 16}
    if verb == "lat":
        defaults |= {"sizes": (8,), "iterations": 1000}
    plan = Plan(verb=verb, **(defaults | dict(given)))
    check(plan, given)
    return plan


def check(plan: Plan, given: Mapping[str, Any] = {}) -> None:
    """Raise `ConfigError` if options of *plan* contradict each other, or its transport lacks one of those *given*."""

    def need(condition: bool, text: str) -> None:
        if not condition:
            raise ConfigError(text)

    need(plan.verb in VERBS and plan.transport in TRANSPORTS and plan.operation in OPERATIONS,
         f"{plan.verb} {plan.transport} {plan.operation}: expected {'|'.join(VERBS)}, {'|'.join(TRANSPORTS)}, "
         f"{'|'.join(OPERATIONS)}")
    need(bool(plan.sizes) and all(1 <= nbytes <= LARGEST_NBYTES for nbytes in plan.sizes),
         f"-s {_shown(plan.sizes)}: a message has 1 to {LARGEST_NBYTES} bytes")
    need(plan.iterations >= 1 and plan.depth >= 1 and plan.receive_depth >= 1 and 1 <= plan.pairs <= 1024,
         f"-n {plan.iterations} -t {plan.depth} -r {plan.receive_depth} -q {plan.pairs}: each is at least 1, "
         "-q at most 1024")
    need(plan.moderation <= plan.depth, f"-Q {plan.moderation} with -t {plan.depth}: -Q must be at most -t, or no send "
                                        "would complete in time for the next one")
    need(plan.mtu in (0, *MTUS), f"-m {plan.mtu}: an RDMA path MTU is one of {', '.join(map(str, MTUS))}")
    need(bool(plan.providers) and set(plan.providers) <= set(PROVIDERS),
         f"--verbs {','.join(plan.providers)}: expected one or several of {', '.join(PROVIDERS)}, separated by commas")
    if plan.transport != "rdma":
        verbs_only = ("mtu", "moderation", "inline_nbytes", "events", "receive_depth", "providers", "ack_timeout",
                      "reversed", "traffic_class", "service_level", "relaxed_ordering", "huge_pages", "cores")
        names = [OPTIONS[name] for name in verbs_only if name in given]
        need(not names, f"{', '.join(names)} requires --transport rdma; the transport is {plan.transport}")
        need(plan.operation == "write_imm", f"--op {plan.operation}: {plan.transport} has one operation, write_imm")
    if plan.verb == "lat":
        need(not plan.duration_s, "-D: latency is measured by iterations; use -n")
        need(plan.pairs == 1 and not plan.both_ways, "-q and -b: latency is measured with one message at a time")
        need(not (plan.events and plan.operation == "write"),
             "-e with --op write: a write causes no event at the peer, which polls its memory; use --op write_imm")
    need(not (plan.reversed and (plan.both_ways or plan.verb == "lat")),
         "--reversed has no effect with -b or for latency, where both sides send")
    need(not (plan.both_ways and plan.transport == "shm"), "-b: shared memory is measured in one direction only")


def agree(plan: Plan, given: Mapping[str, Any]) -> None:
    """Raise `MismatchError` if the client's *plan* contradicts the options *given* to this server."""
    wrong = [f"{OPTIONS.get(name, name)}: {_shown(getattr(plan, name))} at the client, {_shown(value)} here"
             for name, value in given.items() if getattr(plan, name) != value]
    if wrong:
        raise MismatchError(f"the two sides have different options: {'; '.join(wrong)}. Start both with the same ones, "
                            "or the server without any")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) if len(value) <= 4 else f"{value[0]},{value[1]}...{value[-1]}"
    return str(value)
