"""The addresses at which a node looks for the scheduler: the next one, and what names mean."""
from __future__ import annotations

import socket
import time

import pytest

from bpsfast.orchestration.scheduler_addresses import SchedulerAddresses


def test_they_are_tried_in_turn_and_then_from_the_first_on():
    addresses = SchedulerAddresses([("10.0.0.1", 7), ("::1", 8), ("10.0.0.3", 9)], 0.0)
    assert str(addresses) == "10.0.0.1:7, [::1]:8, 10.0.0.3:9" and addresses.are_several
    found = []
    for _ in range(4):
        found.append(addresses.choose())
        addresses.advance()
    assert found == [("10.0.0.1", 7), ("::1", 8), ("10.0.0.3", 9), ("10.0.0.1", 7)]


def test_the_only_one_is_always_the_next():
    addresses = SchedulerAddresses([("10.0.0.1", 7)], 0.0)
    addresses.advance()
    assert addresses.choose() == ("10.0.0.1", 7) and not addresses.are_several


class Names:
    """A resolver that knows what a test says."""

    def __init__(self):
        self.known = {}

    def getaddrinfo(self, host, *arguments, **keywords):
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, 0))
                for each in self.known[host]]


@pytest.fixture
def names(monkeypatch):
    found = Names()
    monkeypatch.setattr(socket, "getaddrinfo", found.getaddrinfo)
    return found


def look_up(addresses, now):
    addresses.look_up(now)
    until = time.monotonic() + 20.0
    while any(entry.lookup is not None for entry in addresses._entries):
        assert time.monotonic() < until
        addresses.take_answers(0.1)


def test_a_name_that_is_not_known_is_passed_over(names):
    addresses = SchedulerAddresses([("gone.example", 7), ("b.example", 8)], 0.0)
    assert addresses.choose() is None and addresses.unresolved == ["gone.example", "b.example"]
    names.known["b.example"] = ["10.0.0.2"]
    look_up(addresses, 0.0)
    assert addresses.choose() == ("10.0.0.2", 8) and addresses.unresolved == ["gone.example"]
    addresses.advance()
    assert addresses.choose() == ("10.0.0.2", 8)
    addresses.keep()
    names.known["gone.example"] = ["10.0.0.1"]
    look_up(addresses, 5.0)
    assert addresses.choose() == ("10.0.0.2", 8), "the one that answers stays"
    addresses.advance()
    assert addresses.choose() == ("10.0.0.1", 7) and addresses.is_at_first


def test_the_first_name_comes_first_as_soon_as_it_is_known(names):
    addresses = SchedulerAddresses([("a.example", 7), ("10.0.0.2", 8)], 0.0)
    assert addresses.choose() == ("10.0.0.2", 8) and addresses.awaits_first
    names.known["a.example"] = ["10.0.0.1"]
    look_up(addresses, 0.0)
    assert addresses.choose() == ("10.0.0.1", 7) and not addresses.awaits_first
    addresses.advance()
    assert addresses.choose() == ("10.0.0.2", 8), "once"


def test_all_addresses_of_a_name_are_tried(names):
    names.known["a.example"] = ["2001:db8::1", "10.0.0.1", "10.0.0.2"]
    addresses = SchedulerAddresses([("a.example", 7), ("10.0.0.9", 8)], 0.0)
    look_up(addresses, 0.0)
    found = []
    for _ in range(4):
        found.append(addresses.choose())
        addresses.advance()
        names.known["a.example"].reverse()  # a resolver gives them in any order
        look_up(addresses, 10.0 * len(found))
    assert found == [("10.0.0.1", 7), ("10.0.0.2", 7), ("2001:db8::1", 7), ("10.0.0.9", 8)]


def test_a_name_whose_address_changes_is_tried_at_the_new_one(names):
    names.known["a.example"] = ["10.0.0.1"]
    addresses = SchedulerAddresses([("a.example", 7), ("10.0.0.9", 8)], 0.0)
    look_up(addresses, 0.0)
    assert addresses.choose() == ("10.0.0.1", 7)
    names.known["a.example"] = ["10.0.0.5"]
    look_up(addresses, 2.0)
    assert addresses.choose() == ("10.0.0.5", 7)
    del names.known["a.example"]
    look_up(addresses, 4.0)
    assert addresses.choose() == ("10.0.0.5", 7), "the last answer counts"
