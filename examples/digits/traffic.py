"""What the job's machines put on the wire while training, beside what the placement predicts and what a ring needs.

Measured by the kernel's counters of each machine's network interface where the machines are network namespaces
(``bpsfast run --netns``): all bytes, with headers, acknowledgements and control messages. Elsewhere by the counters of
the nodes' own tcp streams: payload and partition headers.
"""
from __future__ import annotations

import os
import shutil

import bpsfast
from bpsfast import torch as bps
from bpsfast.launch.namespaces import netns
from bpsfast.orchestration.placement.assignment import WireBytes, assign, predict_wire, ring_wire
from bpsfast.orchestration.placement.shares import Machine
from bpsfast.trainer.process import current

Counts = dict[str, dict[str, int]]  # machine -> {"sent": bytes, "received": bytes}


def machines() -> list[str]:
    """Return the names of the job's machines in node order, as `bpsfast run` calls them."""
    n_workers, n_helpers = current().n_nodes, current().n_helpers
    return [f"node{i}" for i in range(n_workers)] + [f"helper{i}" for i in range(n_helpers)]


def predicted(names: list[str], n_steps: int) -> tuple[Counts, Counts]:
    """Return the payload bytes of *n_steps* steps with the gradients *names*: as this job moves them, and round a ring.

    Placement is pure, so it can be repeated here from the sizes of all partitions: those that were placed before the
    gradients, one unit at a time (the broadcast channel, and which gradients are sparse), then those of the gradients.
    """
    places = [Machine(has_ranks=name.startswith("node")) for name in machines()]
    tensors = current().tensors
    gradients = {tensors.unit(name).number for name in names}
    owned = [0] * len(places)
    for unit in sorted(tensors.units(), key=lambda unit: unit.number):
        if unit.number < min(gradients):
            _, owned = _place(_parts([next(iter(unit.members))]), places, owned)
    sizes = _parts(names)
    owners, _ = _place(sizes, places, owned)

    def counts(wire: list[WireBytes]) -> Counts:
        return {name: {"sent": w.tx * n_steps, "received": w.rx * n_steps} for name, w in zip(machines(), wire)}

    return counts(predict_wire(zip(sizes, owners), places)), counts(ring_wire(sum(sizes), places))


def _parts(names: list[str]) -> list[int]:
    """Return the bytes of each partition of the units that *names* are members of, in the order of their indexes."""
    units = {unit.first_part: unit for unit in map(current().tensors.unit, names)}
    in_order = [unit for _, unit in sorted(units.items())]
    return [min(unit.stride, unit.nbytes - i * unit.stride) for unit in in_order for i in range(unit.n_parts)]


def _place(sizes: list[int], places: list[Machine], owned: list[int]) -> tuple[list[int], list[int]]:
    """Return the owner of each partition, and the bytes that each machine then owns."""
    owners = assign(sizes, places, current().settings.placement, owned)
    after = list(owned)
    for owner, nbytes in zip(owners, sizes):
        after[owner] += nbytes
    return owners, after


class Meter:
    """Counts the job's traffic from one `read` to the next; all ranks call all methods together."""

    def __init__(self) -> None:
        self.namespaces = _namespaces() if bpsfast.rank() == 0 else {}
        self.source = "kernel interface counters" if self.namespaces else "transport counters"
        self._readings: list[Counts] = []

    def read(self) -> None:
        """Take a reading while nobody sends."""
        bpsfast.barrier()
        if self.namespaces:
            traffic = {name: netns.traffic(namespace) for name, namespace in self.namespaces.items()}
            self._readings.append({name: {"sent": t.tx, "received": t.rx} for name, t in traffic.items()})
        else:
            self._readings.append(_streams())
        bpsfast.barrier()

    def between(self) -> Counts:
        """Return what each machine sent and received between the last two readings. Right on rank 0."""
        before, after = self._readings[-2:]
        mine = {name: {way: after[name][way] - before[name][way] for way in after[name]} for name in after}
        # rank 0 has seen all interfaces; streams are known to the machine they end on
        leaders = [bps.broadcast_object((bpsfast.local_rank() == 0, mine), rank) for rank in range(bpsfast.size())]
        if self.namespaces:
            return mine
        total = {name: {"sent": 0, "received": 0} for name in machines()}
        for is_leader, found in leaders:
            if is_leader:
                for name, count in found.items():
                    for way, nbytes in count.items():
                        total[name][way] += nbytes
        return total


def _streams() -> Counts:
    """Return the counters of this machine's tcp streams, under its own name, and mirrored under helpers' names.

    No rank runs on a helper: what it received is what its peers have sent to it.
    """
    session, stats, names = current(), bpsfast.counters(), machines()
    found: Counts = {names[session.node]: {"sent": 0, "received": 0}}
    for peer, name in enumerate(names):
        sent, received = (stats.get(f"wire_{peer}_bytes_{way}", 0) for way in ("sent", "received"))
        found[names[session.node]]["sent"] += sent
        found[names[session.node]]["received"] += received
        if name.startswith("helper"):
            found[name] = {"sent": received, "received": sent}
    return found


def _namespaces() -> dict[str, str]:
    """Return the network namespace of each machine, {} if this process is not in one of `bpsfast run --netns`."""
    if shutil.which("ip") is None:
        return {}
    prefix, _, machine = netns.ip("netns", "identify", str(os.getpid())).strip().rpartition(".")
    return {name: f"{prefix}.{name}" for name in machines()} if machine == machines()[0] else {}
