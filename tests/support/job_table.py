"""A job with the messages sent to each node, for tests of the scheduler's decisions."""
from __future__ import annotations

from collections import defaultdict

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.job.admission import JobSettings
from bpsfast.orchestration.job.job import Job
from bpsfast.orchestration.messages import TensorSpec


def join(host="a", n_ranks=1, **fields):
    base = dict(version=m.VERSION, package="1.0", host=host, pid=1, index=-1, ranks=(-1,) * n_ranks, server_processes=0,
                address=f"{host}:1", shm_name="", nic_rate_bytes=0.0, settings={"transport": "tcp"})
    return m.Join(**{**base, **fields})


def spec(name, **fields):
    return TensorSpec(**{"name": name, "dtype": "float32", "shape": (1024,), **fields})


class Table:
    """A job with the messages sent to each node, in order."""

    def __init__(self, **fields):
        self.job = Job(JobSettings(**{"num_nodes": 2, **fields}), 0.0)
        self.now = 0.0
        self.inbox = defaultdict(list)

    def post(self, outgoing):
        for destination, message in outgoing:
            self.inbox[destination].append(message)

    def say(self, sender, *spoken):
        for message in spoken:
            self.post(self.job.receive(self.now, sender, message))

    def tick(self, to):
        self.now = to
        self.post(self.job.tick(to))

    def got(self, sender, kind):
        """Return the messages of *kind* sent to *sender* since the last call."""
        found = [message for message in self.inbox[sender] if isinstance(message, kind)]
        self.inbox[sender] = [message for message in self.inbox[sender] if not isinstance(message, kind)]
        return found


def welcomed(**fields):
    """Return a table with two nodes of two ranks and one helper, admitted."""
    table = Table(num_helpers=1, **fields)
    table.say(b"A", join("a", 2))
    table.say(b"H", join("h", 0))
    table.say(b"B", join("b", 2))
    return table


def committed(*names):
    """Return the same table with *names* committed."""
    table = welcomed()
    for sender, ranks in ((b"A", (0, 1)), (b"B", (2, 3))):
        table.say(sender, *(m.Declare(rank=rank, tensors=tuple(map(spec, names))) for rank in ranks))
    for sender in (b"A", b"B", b"H"):
        table.say(sender, m.Ready(generation=1))
        assert len(table.got(sender, m.Plan)) == 1
    for sender in (b"A", b"B", b"H"):
        assert len(table.got(sender, m.Commit)) == 1
    return table


ALL = (b"A", b"B", b"H")
