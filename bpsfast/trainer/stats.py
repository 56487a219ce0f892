"""Statistics of a running job for the program: `stats`, `counters`, `stalls`, `get_pushpull_speed`."""
from __future__ import annotations

import msgspec

from ..orchestration.errors import ConfigError
from ..orchestration.messages import LagRow, RankLag
from . import process
from .membership import Loss
from .stall_inspector import Stall
from .step_clock import StepTimes


class LocalLag(msgspec.Struct, frozen=True, kw_only=True):
    """How late rank `rank` announced its inputs, compared to the first rank of this machine, over `count` units.

    `p99_s` is the upper bound of a half-octave bin, so up to 50 % too high. `last_share`: the share in which it was
    last.
    """

    rank: int
    count: int
    mean_s: float
    max_s: float
    p99_s: float
    last_share: float

    @classmethod
    def of(cls, row: LagRow) -> LocalLag:
        """Return *row*, which counts at least one unit, in seconds."""
        return cls(rank=row.rank, count=row.count, mean_s=row.total_ns / row.count / 1e9, max_s=row.max_ns / 1e9,
                   p99_s=row.p99_ns / 1e9, last_share=row.n_last / row.count)


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank and its machine's node have done so far.

    `steps` counts completed steps without the first; `mean` is their mean. `pushed_bytes` are this rank's inputs and
    `pulled_bytes` the results of this machine, in shared memory; `sent_bytes` and `received_bytes` are the node's
    network traffic (none between nodes that share memory). `queued` partitions wait for the network card, `peak_queued`
    is the maximum. `local_lags`: ranks of this machine; `job_lags`: all ranks, on request, without those of
    `silent_nodes`. `counters`: see `counters`. `members`, `losses`: see there.
    """

    rank: int
    node: int
    steps: int
    mean: StepTimes
    last: StepTimes
    pushed_bytes: int
    pulled_bytes: int
    sent_bytes: int
    received_bytes: int
    queued: int
    peak_queued: int
    partition_bytes: int
    credit_bytes: int
    local_lags: tuple[LocalLag, ...]
    job_lags: tuple[RankLag, ...]
    silent_nodes: tuple[int, ...]
    stalls: tuple[Stall, ...]
    counters: dict[str, int]
    members: tuple[int, ...]
    losses: tuple[Loss, ...]

    def json(self) -> str:
        """Return everything as one JSON object."""
        return msgspec.json.encode(self).decode()


def stats(job: bool = False) -> Stats:
    """Return where the time of this rank's steps went, and how many bytes its machine moved. Asks the node.

    Parameters
    ----------
    job
        Also ask all nodes how late the ranks of the whole job are: `Stats.job_lags`. Any rank may ask alone.

    Raises
    ------
    StallError, PeerLostError
        If node or scheduler do not reply, or are lost.
    """
    session = process.current()
    told = session.ask_node()
    answer = session.ask_lags() if job else None
    counters = told.counters
    steps, mean, last = session.clock.read()
    moved = {way: sum(value for name, value in counters.items() if name.startswith("wire_") and name.endswith(way))
             for way in ("_bytes_sent", "_bytes_received")}
    return Stats(
        rank=session.rank, node=session.node, steps=steps, mean=mean, last=last,
        pushed_bytes=counters[f"rank_{session.rank}_pushed_bytes"], pulled_bytes=counters["engine_published_bytes"],
        sent_bytes=moved["_bytes_sent"], received_bytes=moved["_bytes_received"], queued=counters["dispatch_queued"],
        peak_queued=counters["dispatch_peak_queued"], partition_bytes=session.settings.partition_bytes,
        credit_bytes=session.settings.credit_bytes, local_lags=tuple(LocalLag.of(row) for row in told.lags),
        job_lags=answer.ranks if answer else (), silent_nodes=answer.silent_nodes if answer else (),
        stalls=session.inspector.stalls(), counters=counters, members=session.membership.members,
        losses=tuple(session.membership.losses))


def counters() -> dict[str, int]:
    """Return the counters of this machine's node: bytes moved and summed, messages, registrations."""
    return process.current().ask_node().counters


def contributors(name: str) -> tuple[int, ...]:
    """Return the ranks whose inputs are in the last sum of tensor *name* that this rank has waited for.

    Averages are divided by their number. It is all ranks of the job, unless some were lost (the setting
    on_worker_loss). Raises `ConfigError` if this rank has summed no tensor of that name.
    """
    unit = process.current().tensors.unit_nowait(name)
    if unit is None or not unit.has_begun:
        raise ConfigError(f"contributors({name!r}): this rank has summed no tensor of that name")
    return unit.contributors()


def stalls() -> tuple[Stall, ...]:
    """Return the waits of this rank that took longer than the setting stall_warn_s; current ones first."""
    return process.current().inspector.stalls()


def get_pushpull_speed() -> tuple[int, float]:
    """Return (milliseconds since 1970, MB/s pushed by this rank): BytePS's call, for programs that plot it.

    There is a point for every ten seconds or more in which something was pushed; each call takes the oldest of at most
    1024. Without a point: (0, -5.0), as in BytePS. Unlike BytePS, bytes are divided by the time that has passed.
    """
    return process.current().clock.speed()
