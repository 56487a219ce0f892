"""Decides which data connections are encrypted (setting encryption), and derives the keys of both directions.

The keys follow from the job's key and the connection's nonces (`security.HandshakeResult`): nothing more is exchanged.
An attacker who has recorded the bytes and later learns the job's key can read them: no forward secrecy (SECURITY.md).
"""
from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import Enum

from ..orchestration.errors import ConfigError
from ..orchestration.security import direction_key
from ..pyx.seal import Seal, load
from .addresses import is_loopback
from .settings import Settings


class Encryption(Enum):
    """Which tcp connections are encrypted. Both ends decide by one rule, and refuse a connection if they differ."""

    NONE = "none"
    BETWEEN_MACHINES = "between machines"
    ALL = "all"

    @classmethod
    def of(cls, settings: Settings) -> Encryption:
        """Return what *settings* ask for. `ALL` excludes RDMA, `BETWEEN_MACHINES` does not."""
        if settings.encryption == "auto":
            return cls.NONE if settings.insecure else cls.BETWEEN_MACHINES
        return cls.ALL if settings.encryption == "on" else cls.NONE

    def covers(self, sock: socket.socket) -> bool:
        """Return whether *sock*, which is connected, is encrypted. Local sockets never are; OSError if it has ended."""
        if self is Encryption.NONE or sock.family == socket.AF_UNIX:
            return False
        return self is Encryption.ALL or not is_loopback(sock.getsockname()[0])


@dataclass(frozen=True)
class Seals:
    """Both directions of one connection: what goes out, and what comes in."""

    out: Seal
    incoming: Seal


def seals_of(secret: bytes, *, dialled: bool) -> Seals:
    """Return the seals of the connection with *secret*, which this side has *dialled*, or else accepted."""
    ours, theirs = ("dialler", "acceptor") if dialled else ("acceptor", "dialler")
    return Seals(Seal(direction_key(secret, ours), closes=True), Seal(direction_key(secret, theirs), closes=False))


def check(settings: Settings) -> None:
    """Raise `ConfigError` unless what *settings* ask for can be encrypted here."""
    encryption = Encryption.of(settings)
    if encryption is Encryption.ALL and settings.transport == "rdma":
        raise ConfigError("encryption='on' contradicts transport='rdma': what a card writes is not encrypted; use "
                          "transport=tcp or auto, or a network that encrypts")
    if encryption is not Encryption.NONE:
        check_library()


def check_library() -> None:
    """Raise `ConfigError` unless this machine has what seals are made with."""
    try:
        load()
    except OSError as exc:
        raise ConfigError(f"connections between machines are encrypted by OpenSSL's libcrypto, which cannot be used "
                          f"here: {exc}; install it (Debian, Ubuntu: apt-get install libssl3), or set "
                          "BPSFAST_ENCRYPTION=off on all machines") from exc
