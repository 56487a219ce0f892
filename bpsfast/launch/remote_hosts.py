"""All hosts of a job: reached, checked and found fit before anything is started on any of them."""
from __future__ import annotations

import contextlib
import functools
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..orchestration.errors import BpsError, ConfigError
from . import remote_protocol as messages
from .host_list import Host
from .output import Output
from .remote_agent import PULSE_S, reached
from .remote_host import RemoteHost
from .ssh import Ssh

#: From the start of ssh to the first word of the agent: connecting, login scripts, Python.
AGENT_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 30.0
_LOOPBACK = "127.0.0.1"


class RemoteHosts:
    """An agent on each of *hosts*, from `connect` until `close`. A context manager; main thread only."""

    def __init__(self, hosts: Sequence[Host], ssh: Ssh, output: Output) -> None:
        self._ssh = ssh
        self.hosts: list[RemoteHost] = []
        self._is_over = threading.Event()
        # of its own: whoever shows output may have to wait for a terminal for as long as somebody reads there
        self._pulse = threading.Thread(target=self._show_life, name="bpsfast-pulse", daemon=True)
        if not all(host.is_here for host in hosts):
            ssh.check()
        try:
            for host in hosts:
                self.hosts.append(RemoteHost(host, ssh, output))
            self._pulse.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RemoteHosts:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def connect(self) -> None:
        """Wait until every host has an agent of this version in the working directory.

        Raises
        ------
        BpsError
            One line for each host that has not, and what to type; of the class of the first one.
        """
        self._until(lambda host: host.here is not None, self.hosts, AGENT_TIMEOUT_S)
        answers = self.ask(self.hosts, messages.Prepare(self._ssh.directory or os.getcwd()))
        refused = [(host, answer.reason) for host, answer in zip(self.hosts, answers)
                   if isinstance(answer, messages.Refused)]
        if refused:
            raise ConfigError("; ".join(f"{host.host.name}: {reason}" for host, reason in refused))

    def ask(self, hosts: Sequence[RemoteHost], message: Any) -> list[Any]:
        """Return the answer of each of *hosts* to *message*."""
        for host in hosts:
            host.tell(message)
        self._until(lambda host: bool(host.answers), hosts, _ANSWER_TIMEOUT_S)
        return [host.answers.pop(0) for host in hosts]

    def scheduler_address(self, wished: str = "") -> tuple[str, int]:
        """Return address and port of the scheduler, which is to run on the first host, so that all hosts reach it.

        Raises
        ------
        ConfigError
            See `address_of`.
        """
        first, others = self.hosts[0], self.hosts[1:]
        if not others and not wished:
            port = self.ask([first], messages.Listen(is_loopback=True))[0].port
            self.ask([first], messages.StopListening())
            return _LOOPBACK, port
        try:
            return self.address_of(first, others, wished)
        except ConfigError as exc:
            if wished:
                raise ConfigError(f"{exc}. --scheduler-host takes a name or an address of {first.host.name}, where the "
                                  "scheduler runs, that every host can look up and reach") from exc
            raise ConfigError(f"{exc}. The scheduler runs on the first host: open its ports, name another host first, "
                              "or --scheduler-host") from exc

    def master_port(self) -> int:
        """Return a port that is free on the first host, where rank 0 runs, and kept for what that starts."""
        return self.ask([self.hosts[0]], messages.Reserve())[0].port

    def address_of(self, target: RemoteHost, others: Sequence[RemoteHost], wished: str = "",
                   from_here: bool = False) -> tuple[str, int]:
        """Return an address of *target* by which *others* (and this machine) reach it, and a port that is free there.

        Tried are all addresses of *target*, at first the one that ssh came to; or *wished* alone, by *target* itself,
        too, since its own processes look it up.

        Raises
        ------
        ConfigError
            No address is reached by all: which ones were tried from where, and what was found.
        """
        assert target.here is not None, "connected"
        name, candidates = target.host.name, [wished] if wished else target.here.addresses
        if target.host.is_here and not (wished or others):
            candidates = [*candidates, _LOOPBACK]  # a machine without a network reaches itself
        if not candidates:
            raise ConfigError(f"{name} has no IPv4 address besides loopback by which other hosts could reach it")
        listening = self.ask([target], messages.Listen(is_loopback=False))[0]
        question = messages.Reach(candidates, listening.port, listening.token)
        asked = [target, *others] if wished else others
        found = {host.host.name: answer.errors for host, answer in zip(asked, self.ask(asked, question))}
        if from_here:
            found["here"] = reached(question)
        self.ask([target], messages.StopListening())
        for number, address in enumerate(candidates):
            if not any(errors[number] for errors in found.values()):
                return address, listening.port
        tried = "; ".join(f"from {where} {address}: {error}" for where, errors in found.items()
                          for address, error in zip(candidates, errors) if error)
        raise ConfigError(f"no address of {name} is reached by all ({tried})")

    def close(self) -> None:
        """End whatever runs on the hosts, all at once, and wait for that. Idempotent."""
        for host in self.hosts:
            host.begin_close()
        self._is_over.set()
        if self._pulse.is_alive():
            self._pulse.join()
        for host in self.hosts:
            host.close()

    def _show_life(self) -> None:
        """Let the agents know that we live."""
        while not self._is_over.wait(PULSE_S):
            for host in self.hosts:
                host.tell(messages.Alive())

    def _until(self, is_done: Callable[[RemoteHost], bool], hosts: Sequence[RemoteHost], timeout_s: float) -> None:
        """Take what *hosts* say until all are done or have failed; raise for those that have."""
        deadline = time.monotonic() + timeout_s
        failed: dict[RemoteHost, BpsError] = {}
        with selectors.DefaultSelector() as selector:
            for host in hosts:
                selector.register(host.line.source, selectors.EVENT_READ, functools.partial(_receive, host, failed))
                selector.register(host.complaints, selectors.EVENT_READ,
                                  functools.partial(_hear, host, selector))
            while waiting := [host for host in hosts if host not in failed and not is_done(host)]:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    failed |= {host: host.late(timeout_s) for host in waiting}
                    break
                for key, _ in selector.select(left_s):
                    key.data()
                for host in failed:
                    with contextlib.suppress(KeyError):
                        selector.unregister(host.line.source)
        if failed:
            raise _together([failed[host] for host in hosts if host in failed], len(self.hosts))


def _receive(host: RemoteHost, failed: dict[RemoteHost, BpsError]) -> None:
    try:
        host.receive()
    except BpsError as exc:
        failed[host] = exc


def _hear(host: RemoteHost, selector: selectors.BaseSelector) -> None:
    if not host.hear():
        selector.unregister(host.complaints)


def _together(errors: Sequence[BpsError], n_hosts: int) -> BpsError:
    """Return one error for those of several hosts."""
    if len(errors) == 1:
        return errors[0]
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    lines = "".join(f"\n  {error}" for error in errors)
    return kind(f"{len(errors)} of {n_hosts} hosts cannot be used:{lines}")
