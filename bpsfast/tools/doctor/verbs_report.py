"""What libibverbs says about this machine: the doctor's only use of it, so that all else works without it."""
from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...hardware.verbs import provider as find_provider
from ...orchestration.errors import ConfigError

#: Sizes of the trial registrations, in bytes; the default limits of distributions (64 KiB, 8 MiB) lie in between.
TRIALS = (1 << 20, 16 << 20, 64 << 20)


@dataclass(frozen=True)
class OpenedDevice:
    """What came of opening one device: its limits, its ports by number, and how much memory it registered (bytes)."""

    error: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    ports: dict[int, dict[str, Any]] = field(default_factory=dict)
    registered_nbytes: int = 0
    registration_error: str = ""


@dataclass(frozen=True)
class VerbsReport:
    """What came of loading the library. `error` says why it could not be; then the rest is empty.

    `fork`: "unneeded", "enabled" or "disabled: why", as `bpsfast.pyx.verbs.fork_safety` says.
    """

    provider: str
    error: str = ""
    version: str = ""
    fork: str = ""
    devices: dict[str, OpenedDevice] = field(default_factory=dict)


def examine(provider: str = "native") -> VerbsReport:
    """Load the library, open every device and register up to 64 MiB with each. OSError becomes words in the report."""
    try:
        verbs = find_provider(provider)
        return VerbsReport(provider, version=verbs.version(), fork=verbs.fork_safety(),
                           devices={name: _open(verbs, name) for name in verbs.devices()})
    except OSError as exc:
        return VerbsReport(provider, error=_words(exc))


def recorded(answer: Any) -> VerbsReport | None:
    """Return the report of a recorded machine, None if nobody asked libibverbs there.

    Raises
    ------
    ConfigError
        *answer* is no such report.
    """
    if answer is None:
        return None
    try:
        return msgspec.convert(answer, VerbsReport, str_keys=True)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"what libibverbs said on the recorded machine cannot be read: {exc}") from exc


def _open(verbs: Any, name: str) -> OpenedDevice:
    try:
        with verbs.Device(name) as device:
            attributes = dict(device.attributes)
            ports = {number: device.port(number) for number in range(1, attributes.get("phys_port_cnt", 1) + 1)}
            with verbs.ProtectionDomain(device) as domain:
                nbytes, error = _register(verbs, domain)
    except OSError as exc:
        return OpenedDevice(error=_words(exc))
    return OpenedDevice("", attributes, ports, nbytes, error)


def _register(verbs: Any, domain: Any) -> tuple[int, str]:
    """Return the largest of `TRIALS` that could be registered, and why the next one could not."""
    done = 0
    for nbytes in TRIALS:
        with mmap.mmap(-1, nbytes) as memory:
            try:
                verbs.MemoryRegion(domain, memory).close()
            except OSError as exc:  # its own words name the device and the remedy, which the check does better
                return done, f"ibv_reg_mr of {nbytes >> 20} MiB: {os.strerror(exc.errno or 0)}"
        done = nbytes
    return done, ""


def _words(exc: OSError) -> str:
    return exc.strerror or str(exc)
