"""What an errno means when a verb, a connection or the tools around RDMA give it."""
from __future__ import annotations

import errno
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class ErrnoMeaning:
    """One errno: its number and name, the C library's words, what it means around RDMA, what to do."""

    number: int
    name: str
    text: str
    means: str
    advice: str


_WORDS: dict[int, tuple[str, str]] = {
    errno.EPERM: ("the process lacks a capability or may not lock memory",
                  "bpsfast explain RD01; in a container RD04"),
    errno.ENOENT: ("the device, or the queue pair that a firmware command named, does not exist", "bpsfast devices"),
    errno.EIO: ("the card or its firmware failed, or the device went away", "dmesg | grep -iE 'mlx|infiniband|rdma'"),
    errno.ENXIO: ("the device has no such port, or its driver was unloaded", "bpsfast devices"),
    errno.EAGAIN: ("a queue is full, or there is nothing to be had right now", "try again; in a log it is harmless"),
    errno.ENOMEM: ("registration: memory may not be locked (RLIMIT_MEMLOCK), or too many mappings; creating a "
                   "queue: more entries than the card has (max_qp_wr, max_cqe)",
                   "bpsfast explain RD01, then RD02; ibv_devinfo -v shows the card's limits"),
    errno.EACCES: ("the device file belongs to another group, or memory was registered without the right that a "
                   "request needs", "ls -l /dev/infiniband; bpsfast explain RD04"),
    errno.EFAULT: ("the memory to register is not mapped, or read-only memory was to become writable",
                   "register memory that exists, and writable for remote writes"),
    errno.EBUSY: ("something still uses the object: queue pairs on a queue, regions of a domain",
                  "close children before their parent"),
    errno.ENODEV: ("there is no such device, or its port is gone", "bpsfast devices; bpsfast explain RD03"),
    errno.EINVAL: ("an attribute does not fit: mostly the GID (wrong row, RoCE v1 with v2, IPv4 with IPv6), the path "
                   "MTU (above the port's), or the state (RTR only after INIT)",
                   "bpsfast gids --peer HOST; bpsfast explain RD05 and RD08"),
    errno.ENOSPC: ("a table of the card is full", "fewer queue pairs or regions; other jobs on the card count too"),
    errno.ENOSYS: ("the kernel has no RDMA, or the provider does not know the verb",
                   "bpsfast explain RD03 and RD15"),
    errno.ENODATA: ("nothing fits what was asked for; libfabric says so when no provider can be used, and not why",
                    "bpsfast doctor gives the reason for each port (RD16)"),
    errno.EPROTONOSUPPORT: ("the device has no such kind of queue pair (EFA has no RC)", "bpsfast explain RD15"),
    errno.EOPNOTSUPP: ("the device cannot do this operation, or this kind of queue pair", "bpsfast explain RD15"),
    errno.EMSGSIZE: ("a message is larger than the port allows, or a packet than the interface's MTU",
                     "bpsfast explain RD08"),
    errno.EADDRINUSE: ("another process listens on that port", "choose another port, or end that process"),
    errno.EADDRNOTAVAIL: ("the address is not of this machine, or a name does not resolve",
                          "ip addr; bpsfast explain RD18"),
    errno.ENETUNREACH: ("there is no route; from ibv_modify_qp: the GID's interface has no route to the peer's GID",
                        "ip route get PEER; bpsfast explain RD05 and RD07"),
    errno.ECONNRESET: ("the peer's process ended or closed the connection", "look into the peer's log"),
    errno.ETIMEDOUT: ("no answer; from ibv_modify_qp to RTR: the peer's hardware address could not be found (ARP, "
                      "neighbour discovery), so wrong GID or wrong network",
                      "ping the peer's address of that interface; bpsfast explain RD05 and RD06"),
    errno.ECONNREFUSED: ("the machine is reached, nobody listens on that port",
                         "start the other side first; check host and port"),
    errno.EHOSTUNREACH: ("no answer to ARP on the last network, or a firewall says no",
                         "ping the peer's address; bpsfast explain RD07 and RD14"),
}


def explain(number: int) -> ErrnoMeaning | None:
    """Return the words for an errno (a positive number), None if it is none, or none that RDMA has to do with."""
    if number not in _WORDS:
        return None
    means, advice = _WORDS[number]
    return ErrnoMeaning(number, errno.errorcode[number], os.strerror(number), means, advice)


def every() -> list[ErrnoMeaning]:
    """Return all that have words."""
    return [words for number in _WORDS if (words := explain(number))]
