"""A job with two helpers: the messages when one of them is lost, and the answers of the nodes."""
from __future__ import annotations

from bpsfast.orchestration import messages as m
from tests.support.job_table import Table, join, spec

#: Senders in node order: A has ranks 0 and 1, B has rank 2, H and I are helpers.
NODES = (b"A", b"B", b"H", b"I")
WORKERS = NODES[:2]


class LossyTable(Table):
    """An admitted job; `owned`: numbers of committed partitions of each node."""

    def __init__(self, placement="optimal", joins=None, **fields):
        super().__init__(**{"num_nodes": 2, "num_helpers": 2, "max_helpers": 8, "placement": placement,
                            "partition_nbytes": 4096, "fusion_nbytes": 0, **fields})
        joins = joins or {}
        for sender, n_ranks in zip(NODES, (2, 1, 0, 0)):
            if sender != b"I" or self.job.settings.num_helpers == 2:
                self.say(sender, join(sender.decode().lower(), n_ranks, **joins.get(sender, {})))
        self.owned = {}

    def declare(self, *specs):
        for sender, ranks in ((b"A", (0, 1)), (b"B", (2,))):
            self.say(sender, *(m.Declare(rank=rank, tensors=specs) for rank in ranks))

    def commit(self, *specs, **ready):
        """Declare *specs* ("w" of eight partitions) and commit them."""
        self.declare(*(specs or (spec("w", shape=(8192,)),)))
        plans = [self.got(sender, m.Plan) for sender in self.alive]
        (plan,) = plans[0]
        assert plans == [[plan]] * len(self.alive)
        self.ready(plan.generation, **ready)
        assert all(len(self.got(sender, m.Commit)) == 1 for sender in self.alive)
        for unit in plan.units:
            for part in unit.parts:
                self.owned.setdefault(part.owner, []).append(part.part)
        return self

    @property
    def alive(self):
        return [sender for sender in NODES if sender in self.job._heartbeats.seen]

    def ready(self, generation, **fields):
        for sender in self.alive:
            self.say(sender, m.Ready(generation=generation, **fields))

    def everybody_beats(self, to):
        """Advance the clock, with heartbeats of all members."""
        for sender in self.alive:
            self.say(sender, m.Heartbeat(sequence=0))
        self.tick(float(to))

    def lose(self, sender):
        self.post(self.job.unreachable(self.now, sender))

    def frozen(self, progress, epoch=2, near=None, only=NODES):
        """Report that all nodes stopped; *progress*: sender -> (part, passed on, complete, place) of each part."""
        for sender in self.alive:
            if sender in only:
                self.say(sender, m.FreezeReport(epoch=epoch, progress=tuple(progress.get(sender, ())),
                                          near=(near or {}).get(sender, ())))

    def everywhere(self, parts, passed_on=5, complete=5):
        """Return the progress of all workers if all are at the same round, and read results in their own memory."""
        return {sender: [(part, passed_on, complete, index) for part in parts] for index, sender in enumerate(WORKERS)}

    def recover(self):
        """Return the `Recover` message, which is the same for all remaining nodes."""
        told = [self.got(sender, m.Recover) for sender in self.alive]
        assert all(each == told[0] for each in told) and len(told[0]) == 1, self.job.aborted
        return told[0][0]

    def successions(self):
        return {each.part: each for each in self.recover().owner_changes}
