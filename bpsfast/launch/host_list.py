"""Parse the hosts of a job, and their numbers of ranks, in Horovod's and MPI's syntax: ``-H``, hostfiles, scripts.

    -H gpu01:4,user@gpu02:4,[fd00::3]:2     a host without :N has one slot

    gpu01 slots=4        # a hostfile; comments and empty lines do not count
    user@gpu02:4
    fd00::3 slots = 2    # an IPv6 address needs brackets only before a colon

A script that lists hosts (`listed`) prints ``host`` or ``host:N`` on each line, as for Horovod.

If a hostfile names a host on several lines, its slots are added up, as by Open MPI: ``$PBS_NODEFILE`` and
``$LSB_DJOB_HOSTFILE`` have a line for each slot. ``-H`` may name a host once.

Hostfiles of other systems, with CRLF line ends or a byte order mark, are accepted.
"""
from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ..base.addresses import is_loopback, local_hosts_among
from ..orchestration.errors import ConfigError

#: No control characters, and no leading dash, which would be an option of ssh.
_WORD = r"[^@\s:,\[\]\x00-\x1f\x7f-\x9f-][^@\s:,\[\]\x00-\x1f\x7f-\x9f]*"
_USER_AT_HOST = re.compile(rf"(?:{_WORD}@)?(?:\[[0-9a-fA-F:.]+(?:%\w+)?\]|{_WORD})")
_BARE_IPV6 = re.compile(r"[0-9a-fA-F.]*(?::[0-9a-fA-F.]*){2,}(?:%\w+)?")
_SLOTS = re.compile(r"\s+slots\s*=\s*(\S*)", re.I)
#: Open MPI's second limit. Ranks never exceed the slots here, so any value is respected.
_MAX_SLOTS = re.compile(r"\s+max[-_]slots\s*=\s*\d+", re.I)
_N_SLOTS = 4096


class Host(msgspec.Struct, frozen=True):
    """One host: the name for ssh, with a user if one was given (``user@name``), and its number of ranks."""

    name: str
    slots: int = 1
    #: whether `with_own` found that the name means this machine and user
    is_own: bool = False

    @property
    def is_here(self) -> bool:
        """Whether this is the launcher's machine and user, which need no ssh."""
        return self.is_own or (_is_own_user(self.name) and is_loopback(_machine(self.name)))


def parse(text: str) -> list[Host]:
    """Return the hosts of ``-H``: ``host[:slots],...``.

    Raises `ConfigError` if the text is no such list, or names a host twice.
    """
    return _once([_host(part.strip(), f"-H {text}") for part in text.split(",")], "-H")


def read(path: Path) -> list[Host]:
    """Return the hosts of a hostfile: ``host slots=N``, ``host:N`` or ``host`` (one slot) on a line.

    Hosts are in the order of their first lines, with the slots of all their lines.

    Raises `ConfigError` if the file cannot be read or has no host, a line is invalid, or a host has two users.
    """
    try:
        whole = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--hostfile {path} cannot be read: {exc}") from exc
    if "\0" in whole:
        raise ConfigError(f"--hostfile {path} has NUL bytes, as UTF-16 without a byte order mark has: save it as UTF-8")
    found = []
    for number, line in enumerate(whole.splitlines(), 1):
        text, where = line.partition("#")[0].strip(), f"{path}:{number}"
        if not text:
            continue
        text = _MAX_SLOTS.sub("", text)
        slots = _SLOTS.search(text)
        if slots is None:
            found.append(_host(text, where))
            continue
        name = text[:slots.start()] + text[slots.end():]
        found.append(Host(_name(name, where), _count(slots[1], where)))
    if not found:
        raise ConfigError(f"--hostfile {path} names no host: expected lines such as `gpu01 slots=4`")
    return _added_up(found, f"--hostfile {path}")


def listed(text: str, slots: int, where: str) -> list[Host]:
    """Return the hosts that a script has printed, ``host`` (with *slots* slots) or ``host:N`` on a line; maybe none.

    *where* names the script. Raises `ConfigError` if a line is invalid, or a host is named twice.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return _once([_host(line, f"{where}, line {number}", slots) for number, line in lines if line], where)


def with_own(hosts: Sequence[Host]) -> list[Host]:
    """Return *hosts*, with names and addresses of this machine marked (`is_own`), which need no ssh.

    If there are several, the first one gets the slots of all, as it is one machine with one node. Looks names up, for
    at most two seconds.
    """
    own = local_hosts_among({_machine(host.name) for host in hosts if _is_own_user(host.name)})
    found: list[Host] = []
    here: int | None = None
    for host in hosts:
        if not _is_own_user(host.name) or _machine(host.name) not in own:
            found.append(host)
        elif here is None:
            here = len(found)
            found.append(Host(host.name, host.slots, is_own=True))
        else:
            found[here] = Host(found[here].name, found[here].slots + host.slots, is_own=True)
    return found


def helpers(text: str, ranks_on: Iterable[Host]) -> list[Host]:
    """Return the hosts of ``--helpers-on``, which have no ranks.

    Raises `ConfigError` if the text is no list of hosts, or names one twice or one of *ranks_on*.
    """
    found = _once([Host(_name(part.strip(), f"--helpers-on {text}"), 0) for part in text.split(",")], "--helpers-on")
    ranks_on = list(ranks_on)
    busy = {_machine(host.name) for host in ranks_on}
    is_busy_here = any(host.is_here for host in ranks_on)
    found = with_own(found)
    for host in found:
        if _machine(host.name) in busy or (is_busy_here and host.is_here):
            raise ConfigError(f"--helpers-on {text}: {host.name} has ranks, so its node sums already, and a helper "
                              "beside it would share its network card: name hosts without ranks")
    return found


def assign(hosts: Sequence[Host], n_ranks: int | None) -> list[Host]:
    """Return *hosts* with their numbers of ranks as slots: filled in order until *n_ranks* are assigned (None: all).

    Hosts without ranks are left out.

    Raises `ConfigError` if there are fewer slots.
    """
    n_slots = sum(host.slots for host in hosts)
    left = n_slots if n_ranks is None else n_ranks
    if left > n_slots:
        raise ConfigError(f"-n {left} asks for more ranks than the hosts have slots ({n_slots}: "
                          f"{', '.join(f'{host.name}:{host.slots}' for host in hosts)}): give hosts or slots more")
    filled = []
    for host in hosts:
        taken = min(left, host.slots)
        if taken:
            filled.append(msgspec.structs.replace(host, slots=taken))
        left -= taken
    return filled


def _host(text: str, where: str, default: int = 1) -> Host:
    """Return the host in ``host[:slots]``, with *default* slots if there is no number."""
    name, colon, slots = text.rpartition(":")
    if not colon or text.endswith("]"):
        return Host(_name(text, where), default)
    if ":" in name and "]" not in text:
        raise ConfigError(f"{where}: {text!r} may be an IPv6 address or one with slots: write [{text}] or "
                          f"[{name}]:{slots}")
    return Host(_name(name, where), _count(slots, where))


def _name(text: str, where: str) -> str:
    user, at, address = text.rpartition("@")
    if _BARE_IPV6.fullmatch(address):
        address = f"[{address}]"  # slots were given separately: no ambiguity
    if not _USER_AT_HOST.fullmatch(user + at + address):
        raise ConfigError(f"{where}: {text!r} is no host: expected [user@]name or [user@][IPv6 address]")
    return (user + at + address).replace("[", "").replace("]", "")  # as ssh takes it


def _count(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= _N_SLOTS):
        raise ConfigError(f"{where}: {text!r} is no number of slots: expected 1 to {_N_SLOTS}")
    return int(text)


def _added_up(hosts: list[Host], where: str) -> list[Host]:
    found: dict[str, Host] = {}
    for host in hosts:
        machine = _machine(host.name)
        first = found.setdefault(machine, host)
        if first is host:
            continue
        if first.name.rpartition("@")[0] != host.name.rpartition("@")[0]:
            raise ConfigError(f"{where} names {machine} twice, as {first.name} and {host.name}: name it with one user")
        n_slots = first.slots + host.slots
        if n_slots > _N_SLOTS:
            raise ConfigError(f"{where} gives {machine} more than {_N_SLOTS} slots on its lines together")
        found[machine] = msgspec.structs.replace(first, slots=n_slots)
    return list(found.values())


def _once(hosts: list[Host], where: str) -> list[Host]:
    seen: set[str] = set()
    for host in hosts:
        machine = _machine(host.name)
        if machine in seen:
            raise ConfigError(f"{where} names {machine} twice: name it once, with all its slots")
        seen.add(machine)
    return hosts


def _machine(name: str) -> str:
    return name.rpartition("@")[2].lower()


def _is_own_user(name: str) -> bool:
    """Whether the host *name* has no user, or the user of this process."""
    user = name.rpartition("@")[0]
    if not user:
        return True
    try:
        return user == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a user without a name, as in containers
        return False
