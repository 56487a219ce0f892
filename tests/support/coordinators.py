"""Coordinators and their workers in the test's process: real ones, and one whose messages the test writes."""
from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from bpsfast.base.job_key import elastic_key
from bpsfast.base.settings import Settings, load
from bpsfast.elastic import coordinator_client as client_module
from bpsfast.elastic.coordinator_client import CoordinatorClient
from bpsfast.launch.elastic_service import ElasticService
from bpsfast.orchestration.elastic import protocol
from bpsfast.orchestration.elastic.coordinator import ElasticRules
from bpsfast.trainer import process
from tests.launch.test_elastic_service import Worker
from tests.support.channel_ends import receive

KEY = secrets.token_bytes(32)  # different in each process, because ports are reused
LIMIT_S = 20.0


class FakeCoordinator:
    """A coordinator whose every word is the test's."""

    def __init__(self) -> None:
        self._channel = protocol.listen(elastic_key(KEY), "127.0.0.1")
        self.address = f"127.0.0.1:{self._channel.port}"

    def hear(self, n: int) -> list[Any]:
        """Return the next *n* messages, and no more."""
        return receive(self._channel, n)

    def say(self, *spoken: msgspec.Struct) -> None:
        """Send messages to all connected workers."""
        for message in spoken:
            assert self._channel.tell(message) == []

    def close(self) -> None:
        """Be gone. Idempotent."""
        self._channel.close()


class RealCoordinator:
    """A coordinator of *n* ranks that answers, and whoever speaks to it without training."""

    def __init__(self, n: int, **rules: Any) -> None:
        self.service = ElasticService(ElasticRules(**{"max_ranks": n, "within_s": LIMIT_S, **rules}), range(n), KEY,
                                     "127.0.0.1")
        self.address = self.service.address
        self._speakers: list[Worker] = []
        self.service.start()

    def speaker(self, number: int) -> Worker:
        """Return a worker that only sends and receives."""
        self._speakers.append(Worker(self.service, number, KEY))
        return self._speakers[-1]

    def close(self) -> None:
        """Close everything."""
        for speaker in self._speakers:
            speaker.close()
        self.service.close()


def settings_of(address: str, number: int = 0, **values: Any) -> Settings:
    """Return the settings of worker *number*."""
    return load({"coordinator": address, "job_key": KEY.hex(), "member": number, "start_timeout_s": LIMIT_S,
                 **values}, {})


@contextlib.contextmanager
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CoordinatorClient]]:
    """Yield a function that makes clients of the coordinator, which are closed at the end with their sessions."""
    monkeypatch.setattr(process, "_has_left", False)
    monkeypatch.setattr(client_module, "_member", None)
    made: list[CoordinatorClient] = []

    def make(address: str, number: int = 0, **values: Any) -> CoordinatorClient:
        made.append(CoordinatorClient(settings_of(address, number, **values)))
        return made[-1]

    try:
        yield make
    finally:
        process.shutdown()
        if client_module._member is not None:
            made.append(client_module._member)
        for each in made:
            if not each._channel._context.closed:
                each._channel._socket.linger = 0  # nobody may be there any more
            each.close()


@pytest.fixture
def end(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., CoordinatorClient]]:
    """A function that makes clients; see `ends`."""
    with ends(monkeypatch) as make:
        yield make


@pytest.fixture
def coordinator(no_leaks: None) -> Iterator[Callable[..., RealCoordinator]]:
    """A function that makes real coordinators."""
    with contextlib.ExitStack() as stack:
        def make(n: int, **rules: Any) -> RealCoordinator:
            made = RealCoordinator(n, **rules)
            stack.callback(made.close)
            return made

        yield make


@contextlib.contextmanager
def meanwhile(others: Callable[[], None]) -> Iterator[None]:
    """Run *others* in another thread, which must end."""
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(others)
        yield
        future.result(LIMIT_S)


def until(member: CoordinatorClient, is_so: Callable[[], object]) -> None:
    """Let *member* receive until *is_so*."""
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s"
        member._listen(0.1)


def until_connected(member: CoordinatorClient) -> None:
    """Let *member* listen until it is understood by its coordinator."""
    until(member, lambda: member._channel.is_connected)
