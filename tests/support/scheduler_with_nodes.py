"""A scheduler and its nodes, which read messages when a test tells them to: for tests of lost schedulers."""
from __future__ import annotations

from collections import defaultdict

import pytest

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.failover.control_log import ControlLog
from bpsfast.orchestration.failover.scheduler_state import SchedulerState
from bpsfast.orchestration.job.admission import JobSettings
from bpsfast.orchestration.long_lists import as_sent, pieces, with_digest
from tests.support.job_table import join, spec

NODES = {"A": 2, "B": 2, "C": 1, "H": 0}
RANKS = {"A": (0, 1), "B": (2, 3), "C": (4,), "H": ()}
SETTINGS = JobSettings(num_nodes=3, num_helpers=1, max_helpers=3, name="this job")


class Court:
    """A scheduler and its nodes, which read messages when told to; `over`: the connection of each.

    *deaf*: those that have not read yet that they are welcome.
    """

    def __init__(self, deaf=""):
        self.now = 0.0
        self.settings = SETTINGS
        self.scheduler_state = SchedulerState(self.settings, 0.0)
        self.over = {name: m.connection_id(name, 1) for name in NODES}
        self.inbox = defaultdict(list)
        self.control_logs = {name: ControlLog("1.0", {"transport": "tcp"}) for name in NODES}
        for name, n_ranks in NODES.items():
            self.post(self.scheduler_state.receive(0.0, self.over[name], join(name.lower(), n_ranks)))
        self.read(*[name for name in NODES if name not in deaf])

    def post(self, outgoing):
        for sender, message in outgoing:
            self.inbox[sender].append(message)

    def say(self, name, *spoken):
        for message in spoken:
            message = with_digest(message) if isinstance(message, m.Declare) else message
            self.control_logs[name].said(message)
            self.post(self.scheduler_state.receive(self.now, self.over[name], as_sent(message)))

    def read(self, *names):
        """Let nodes read and answer all their messages; return the messages."""
        found = {}
        for name in names:
            found[name] = self.inbox.pop(self.over[name], [])
            for message in found[name]:
                self.control_logs[name].heard(message)
                if isinstance(message, m.Plan | m.Recover):
                    self.say(name, m.Ready(generation=message.generation))
                if isinstance(message, m.RejoinRequest):
                    self.report(name, message.number)
                if isinstance(message, m.ListWanted):
                    self.say(name, *pieces(message.digest, self.control_logs[name].list_of(message.digest)))
        return found

    def report(self, name, recall=0):
        for each in self.control_logs[name].report(recall):
            self.post(self.scheduler_state.receive(self.now, self.over[name], as_sent(each)))

    def declare(self, *tensors, only="ABC"):
        for name in only:
            self.say(name, *(m.Declare(rank=rank, tensors=tensors) for rank in RANKS[name]))

    def hang_up(self, name):
        """Give *name* another connection, over which nothing is said yet; return the one before."""
        before = self.over[name]
        self.over[name] = m.connection_id(name, m.dialled_as(before)[1] + 1)
        return before

    def dial(self, *names):
        for name in names:
            self.hang_up(name)
            self.report(name)

    def lose_scheduler(self, *back):
        self.scheduler_state = SchedulerState(self.settings, self.now)
        self.inbox.clear()
        self.dial(*(back or NODES))

    def tick(self, to, beating=()):
        while self.now < to:
            self.now += 0.5
            for name in beating:
                self.post(self.scheduler_state.receive(self.now, self.over[name], m.Heartbeat(sequence=1)))
            self.post(self.scheduler_state.tick(self.now))

    def kinds(self, name):
        return [type(message) for message in self.inbox[self.over[name]]
                if not isinstance(message, m.Heartbeat | m.ProbeRequest)]

    def got(self, name, kind):
        return [message for message in self.inbox[self.over[name]] if isinstance(message, kind)]


@pytest.fixture
def court():
    """Everybody is welcome, and "w" committed everywhere."""
    court = Court()
    court.declare(spec("w"))
    court.read(*NODES)
    court.read(*NODES)
    return court
