"""Helpers that were asked for and do not come, or go before they are connected: the job begins without them."""
from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

import bpsfast
from bpsfast.base import settings
from bpsfast.base.addresses import listening_socket
from bpsfast.base.settings import fingerprint
from bpsfast.launch.supervisor import Kind
from bpsfast.orchestration import messages as m
from bpsfast.orchestration.scheduler_client import SchedulerClient
from tests.support.jobs import Job
from tests.support.lossy_training import changes, joined, train

MACHINES = ((0,), (1,))
START_TIMEOUT_S = 12.0


class ShortJob(Job):
    """A job of two nodes that expects a helper, which is not started."""

    def _start(self, command: Any, values: dict[str, Any]) -> None:
        if command.kind is not Kind.HELPER:
            super()._start(command, values)
        else:
            self.environ = command.environ

    @property
    def port(self) -> int:
        """The scheduler's."""
        return int(self._ports[0].getsockname()[1])


@pytest.fixture
def short() -> Iterator[ShortJob]:
    """Its ranks have not called `init`."""
    made = ShortJob((1, 1), helpers=1, transport="tcp", placement="ps", partition_bytes=65536, attach=False,
                    start_timeout_s=START_TIMEOUT_S)
    yield made
    made.kill()


def test_a_job_whose_helper_never_comes_begins_without_it_and_takes_it_in_later(short):
    begin = time.monotonic()
    short.call("init")
    assert time.monotonic() - begin < START_TIMEOUT_S
    assert short.run(train, MACHINES, 0, 5) == [[], []]
    short.add("helper 0")
    step = 5
    while any(found < 1 for found in short.run(joined)):
        assert short.run(train, MACHINES, step, step + 5) == [[], []] and step < 2000
        step += 5
    assert short.run(train, MACHINES, step, step + 5) == [[], []]
    assert [recoveries for recoveries, _ in short.run(changes)] == [0, 0]
    short._attached = True
    short.close()


def come_and_go(job: ShortJob) -> None:
    """Be a helper that joins *job*, and whose process is gone when it is welcome."""
    listener = listening_socket("127.0.0.1")
    member = SchedulerClient("127.0.0.1", job.port, job.key, now=time.monotonic())
    try:
        member.send(m.Join(
            version=m.VERSION, package=bpsfast.__version__, host="gone", pid=os.getpid(), index=-1, ranks=(),
            server_processes=0, address="{}:{}".format(*listener.getsockname()), shm_name="", nic_rate_bytes=0.0,
            settings=fingerprint(settings.load({}, job.environ))))
        poller = zmq.Poller()
        poller.register(member.sockets[0], zmq.POLLIN)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not any(isinstance(each, m.Welcome) for each in member.recv_nowait(time.monotonic())):
            member.tick(time.monotonic())
            assert time.monotonic() < deadline
            poller.poll(50)
    finally:
        listener.close()
        member.close(0)


def test_a_helper_that_is_lost_before_it_is_connected_is_done_without(short):
    short._send(None, "init", (), None)
    come_and_go(short)
    begin = time.monotonic()
    short._values(short.outcomes(START_TIMEOUT_S))
    assert time.monotonic() - begin < START_TIMEOUT_S / 2, "it is known to be gone, and not waited for"
    assert short.run(train, MACHINES, 0, 5) == [[], []]
    assert [recoveries for recoveries, _ in short.run(changes)] == [1, 1]
    short._attached = True
    short.close()
