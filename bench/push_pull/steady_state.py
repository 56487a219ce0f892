"""For `bench push_pull`: costs of a step besides time: messages, registrations, allocations, memory."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bpsfast.bench.harness import table
from bpsfast.bench.harness.contestant_group import Group
from bpsfast.bench.harness.samples import Row, take_turns
from bpsfast.tools.planner import catalog

if TYPE_CHECKING:
    from bpsfast.bench.push_pull.options import Plan

_N_STEPS = 50
_SPARE_NBYTES = 64 << 20
#: Counters that must not grow with steps. A request for them is itself a message from each rank.
_CONSTANT = ("control_messages", "registrations", "engine_allocations", "memory_segments")


def run(plan: Plan, ours: Group) -> list[dict[str, Any]]:
    """Run 50 steps of the gradient list; print and return by how much the counters grew."""
    row = Row(ours, "gradients", catalog.load("resnet50").nbytes)
    take_turns([row], 1, n=1, n_warmup=1)
    before = ours.ask("counters", only=[0])[0]
    ours.ask("measure", row.variant, row.nbytes, 0, _N_STEPS)
    after = ours.ask("counters", only=[0])[0]
    processes = ours.ask("process")
    grown = {name: after[name] - before[name] for name in after if name in before}
    found = {
        "n_steps": _N_STEPS,
        "per_step": {name: grown.get(name, 0) / _N_STEPS for name in _CONSTANT},
        "barriers_and_asks": plan.n_ranks + 2,  # `measure` begins with a barrier, and `counters` sends a request
        "segments_nbytes": after["memory_segments"],
        "segments_limit_nbytes": segments_limit_nbytes(plan.n_ranks, row.nbytes, after.get("memory_slot", 0)),
        "node": after,
        "ranks": processes,
    }
    plan.say(_lines(found))
    return [{"section": "steady state", "chosen": {"n_ranks": plan.n_ranks, "nbytes": row.nbytes}, "measured": found}]


def segments_limit_nbytes(n_local: int, nbytes: int, slots_nbytes: int) -> int:
    """Return the allowed size of the segments of a machine with *n_local* ranks for *nbytes* of gradients."""
    return (n_local + 3) * nbytes + slots_nbytes + _SPARE_NBYTES


def _lines(found: dict[str, Any]) -> str:
    lines = [[f"steady state, {found['n_steps']} steps", "per step"]]
    lines += [[name, f"{value:g}"] for name, value in found["per_step"].items()]
    text = f"{table.plain(lines)}\n(of the messages, {found['barriers_and_asks']} are the bench's own)\n"
    text += f"segments: {found['segments_nbytes'] / 1e6:.0f} MB, limit {found['segments_limit_nbytes'] / 1e6:.0f} MB\n"
    node = found["node"]["memory_outside_segments"]
    text += f"resident outside segments: node {node / 1e6:.0f} MB; "
    return text + "; ".join(f"rank {rank}: {process['resident_outside_segments_nbytes'] / 1e6:.0f} MB, "
                            f"imported {', '.join(process['modules']) or 'nothing heavy'}"
                            for rank, process in enumerate(found["ranks"]))
