"""Units that come and go on a rank of a real job: declared, pushed, retired, and again with other partitions."""
from __future__ import annotations

import os

import bpsfast
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.trainer import process


def editions(n, retires):
    """Declare the same tensors *n* times with different partitions, push each twice; return wrong results, and the
    counters and this process's descriptors after each."""
    session, counts, wrong = process.current(), [], []
    for number in range(n):
        names = [f"edition {retires} {number} {i}" for i in range(4)]
        sizes = [3, 50_000, 300_000, 7]
        session.tensors.declare([
            TensorSpec(name=name, dtype="float32", shape=(size,), group=f"edition {retires} {number}",
                       partition_nbytes=4096 << number % 5, fusion_nbytes=1000 << 4 * (number % 3),
                       edition_of=f"editions {retires}")
            for name, size in zip(names, sizes)])
        units = list({session.tensors.unit(name) for name in names})
        regions = [session.memory.allocate(unit.nbytes) for unit in units]
        for step in range(2):
            for unit, region in zip(units, regions):
                region.array.view("f4")[:] = number + step + bpsfast.rank()
                unit.push(region.address, unit.nbytes)
            for unit in units:
                unit.wait(unit.round, session.settings.timeout_s)
                result = unit.view(unit.round).view("f4")
                inside = [result[m.offset // 4:(m.offset + m.nbytes) // 4] for m in unit.members.values()]
                mean = number + step + (bpsfast.size() - 1) / 2
                wrong += [(number, step, unit.name) for each in inside if (each != mean).any()]
        if retires:
            session.retire(units)
            for region in regions:
                session.memory.release(region)
        bpsfast.barrier()
        stats = bpsfast.counters()
        counts.append((stats["memory_segments"], stats["registrations"], len(os.listdir("/proc/self/fd")),
                       len(session.tensors.units())))
    return wrong, counts
