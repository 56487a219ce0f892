"""The seals of an encrypted data connection (setting encryption): a key for each connection and direction.

Both follow from the job's key and the connection's nonces (`security.Greeted`), so there is nothing more to exchange.
Who learns the job's key later, and has recorded the bytes, can read them: no forward secrecy (SECURITY.md).
"""
from __future__ import annotations

from dataclasses import dataclass

from ..orchestration.errors import ConfigError
from ..orchestration.security import direction_key
from ..pyx.seal import Seal, load


@dataclass(frozen=True)
class Seals:
    """Both directions of one connection: what goes out, and what comes in."""

    out: Seal
    incoming: Seal


def seals_of(secret: bytes, *, dialled: bool) -> Seals:
    """Return the seals of the connection with *secret*, which this side has *dialled* or accepted."""
    ours, theirs = ("dialler", "acceptor") if dialled else ("acceptor", "dialler")
    return Seals(Seal(direction_key(secret, ours), closes=True), Seal(direction_key(secret, theirs), closes=False))


def check(transport: str) -> None:
    """Raise `ConfigError` unless what goes by *transport* can be encrypted here."""
    if transport == "rdma":
        raise ConfigError("encryption='on' contradicts transport='rdma': what a card writes is not encrypted; use "
                          "transport=tcp or auto, or a network that encrypts")
    check_library()


def check_library() -> None:
    """Raise `ConfigError` unless this machine has what seals are made with."""
    try:
        load()
    except OSError as exc:
        raise ConfigError(f"encryption='on' needs OpenSSL's libcrypto, which cannot be used here: {exc}; install it "
                          "(Debian, Ubuntu: apt-get install libssl3), or unset BPSFAST_ENCRYPTION") from exc
