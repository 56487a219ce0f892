"""For ``bpsfast top``: what a job did between two reads of its metrics, as data and JSON. Pure functions and data."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from ...orchestration.job.rank_queries import combined
from ...orchestration.messages import LagReport, LagRow
from .scrape import Scrape

#: up: it answers. silent: it does not answer in time. gone: it does not listen any more. By other nodes' metrics:
#: lost: the job went on without it. unseen: it is in the job, but its address is unknown.
State = Literal["up", "silent", "gone", "lost", "unseen"]


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """One node. Rates are per second. Rates, queue and credit are None until it has answered twice.

    `goodput`: bytes of complete results in its memory; `sums`: partitions summed. `queued` partitions wait for the
    network card; `in_flight_bytes` are in flight to all peers, at most `credit_bytes` to each. `recoveries`: number of
    lost helpers, `joined`: number of helpers that joined, since the node started.
    """

    node: int
    state: State
    is_helper: bool
    host: str = ""
    address: str = ""
    sent_bytes_per_s: float | None = None
    received_bytes_per_s: float | None = None
    goodput_bytes_per_s: float | None = None
    sums_per_s: float | None = None
    queued: int | None = None
    in_flight_bytes: int | None = None
    credit_bytes: int | None = None
    segment_bytes: int | None = None
    recoveries: int = 0
    joined: int = 0
    links_replaced: int = 0


class RankSample(msgspec.Struct, frozen=True, kw_only=True):
    """One rank between two samples: steps per second, their mean time, shares spent in bpsfast and hidden, bytes, lag.

    Times and shares of steps are None if no step ended. `stalls`: waits longer than stall_warn_s since the start.
    `lag_s`: mean lag behind the first rank, and the share of units in which it was the last one; None: nothing was
    pushed.
    """

    rank: int
    node: int
    steps: int
    steps_per_s: float
    step_s: float | None
    exposed: float | None
    overlap: float | None
    pushed_bytes_per_s: float
    stalls: int
    lag_s: float | None
    last_share: float | None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A job over `seconds`, until `time` (Unix). `remarks`: changes since the last sample, as text."""

    time: float
    seconds: float
    job: str
    version: str
    nodes: tuple[NodeSample, ...]
    ranks: tuple[RankSample, ...]
    remarks: tuple[str, ...] = ()

    @property
    def stalls(self) -> int:
        """Number of waits longer than stall_warn_s, of all ranks."""
        return sum(rank.stalls for rank in self.ranks)


def node_sample(before: Scrape | None, now: Scrape, address: str) -> NodeSample:
    """Return the sample of a node from two scrapes; *before* is None for a new node."""
    me = next((each.labels for each in now.all("bpsfast_member_up", member=str(now.node))), {})
    common = NodeSample(
        node=now.node, state="up", is_helper=me.get("kind") == "helper", host=me.get("host", ""), address=address,
        queued=int(now.sum("bpsfast_queued_partitions")), in_flight_bytes=int(now.sum("bpsfast_in_flight_bytes")),
        credit_bytes=int(now.sum("bpsfast_credit_bytes")), segment_bytes=int(now.sum("bpsfast_segment_bytes")),
        recoveries=int(now.sum("bpsfast_recoveries_total")), joined=int(now.sum("bpsfast_joined_total")),
        links_replaced=int(now.sum("bpsfast_links_replaced_total")))
    if before is None:
        return common
    return msgspec.structs.replace(
        common, sent_bytes_per_s=_rate("bpsfast_sent_bytes_total", before, now),
        received_bytes_per_s=_rate("bpsfast_received_bytes_total", before, now),
        goodput_bytes_per_s=_rate("bpsfast_published_bytes_total", before, now),
        sums_per_s=_rate("bpsfast_sums_total", before, now))


def rank_samples(pairs: Mapping[int, tuple[Scrape, Scrape]]) -> tuple[RankSample, ...]:
    """Return the samples of all ranks whose nodes were scraped twice, by number."""
    # the lag of each rank, combined as `bpsfast.stats(job=True)` does
    reports = {node: LagReport(number=0, local=_lag_rows("here", before, now), owned=_lag_rows("owned", before, now))
               for node, (before, now) in pairs.items()}
    lags = {each.rank: each for each in combined(reports) if each.count}
    found = []
    for node, (before, now) in pairs.items():
        seconds = now.time_s - before.time_s
        for each in now.all("bpsfast_pushed_bytes_total"):
            rank = each.labels["rank"]
            steps, took, exposed, communication, hidden, pushed = (
                now.sum(name, rank=rank) - before.sum(name, rank=rank) for name in (
                    "bpsfast_steps_total", "bpsfast_step_seconds_total", "bpsfast_exposed_seconds_total",
                    "bpsfast_communication_seconds_total", "bpsfast_hidden_seconds_total",
                    "bpsfast_pushed_bytes_total"))
            lag = lags.get(int(rank))
            found.append(RankSample(
                rank=int(rank), node=node, steps=int(now.sum("bpsfast_steps_total", rank=rank)),
                steps_per_s=max(0.0, steps) / seconds, step_s=took / steps if steps > 0 else None,
                exposed=exposed / took if took > 0 else None,
                overlap=hidden / communication if communication > 0 else None,
                pushed_bytes_per_s=max(0.0, pushed) / seconds,
                stalls=int(now.sum("bpsfast_stalls_total", rank=rank)), lag_s=lag.mean_s if lag else None,
                last_share=lag.last_share if lag else None))
    return tuple(sorted(found, key=lambda each: each.rank))


def _lag_rows(where: str, before: Scrape, now: Scrape) -> tuple[LagRow, ...]:
    rows = []
    for each in now.all("bpsfast_inputs_total", where=where):
        labels = {label: each.labels[label] for label in ("rank", "peer", "where")}
        count, total_s, n_last, last_s = (
            max(0.0, now.sum(name, **labels) - before.sum(name, **labels)) for name in (
                "bpsfast_inputs_total", "bpsfast_input_lag_seconds_total", "bpsfast_input_last_total",
                "bpsfast_input_last_seconds_total"))
        if count > 0:
            rows.append(LagRow(rank=int(each.labels["rank"]), node=int(each.labels["peer"]), count=round(count),
                               total_ns=round(total_s * 1e9), n_last=round(n_last), last_total_ns=round(last_s * 1e9)))
    return tuple(rows) if sum(row.n_last for row in rows) else ()


def _rate(name: str, before: Scrape, now: Scrape) -> float:
    return max(0.0, now.sum(name) - before.sum(name)) / (now.time_s - before.time_s)
