"""Host names and addresses: looks up names with a time limit, and writes an address with its port.

The system's resolver may take half a minute and cannot be interrupted.
"""
from __future__ import annotations

import ipaddress
import socket
import threading


class HostLookup:
    """One look-up of *host* in a thread of its own, which ends when the resolver answers. Any thread may ask."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.addresses: list[str] = []  # those of IPv4 first, once the resolver has answered
        self._error: OSError | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="bpsfast-lookup", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the resolver has answered, after at most *timeout_s*."""
        return self._done.wait(max(0.0, timeout_s))

    def address(self, timeout_s: float) -> str:
        """Return the address, an IPv4 one if there is one, after at most *timeout_s*.

        Raises the resolver's `OSError`, or `TimeoutError` if it has not answered.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"the resolver has not answered within {max(0.0, timeout_s):.3g} s")
        if self._error is not None:
            raise self._error
        return self.addresses[0]

    def _run(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
            found.sort(key=lambda each: each[0] != socket.AF_INET)
            self.addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        except OSError as exc:
            self._error = exc
        except UnicodeError as exc:  # no name at all: a label that is empty, or too long
            self._error = OSError(str(exc))
        self._done.set()


def is_address(host: str) -> bool:
    """Whether *host* is an IP address, which needs no look-up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolve(host: str, timeout_s: float) -> str:
    """Return the address of *host*, a name or an address; raises as `HostLookup.address`."""
    return host if is_address(host) else HostLookup(host).address(timeout_s)


def format_address(host: str, port: int | str) -> str:
    """Return ``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
