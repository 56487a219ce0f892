"""Reading what a node tells Prometheus: its text format, without a library."""
from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple

from bpsfast.orchestration.errors import ConfigError, PeerLostError

_TIMEOUT_S = 10.0
_MOST_NBYTES = 16 << 20
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: -?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    """One line: a name, labels, a value."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """Return the samples of *text*. Raises `ValueError` for a line that is none and no comment."""
    found = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = _SAMPLE.match(line)
        if match is None:
            raise ValueError(f"{line[:80]!r} is no sample")
        name, labels, value = match.groups()
        found.append(Sample(name, dict(_LABEL.findall(labels or "")), float(value)))
    return found


def fetch(address: str) -> list[Sample]:
    """GET the numbers of the node at *address* (host:port).

    Raises
    ------
    ConfigError
        If *address* is none, or what answers there is no exporter.
    PeerLostError
        If nobody answers in time.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{address!r}: expected HOST:PORT of a node's metrics_port, such as 127.0.0.1:9400")
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
            text = answer.read(_MOST_NBYTES).decode("utf-8")
        return parse(text)
    except urllib.error.HTTPError as exc:
        raise PeerLostError(f"the node at {address} could not tell its numbers: {exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"what answers at {address} is no node's exporter: {exc}") from exc
    except OSError as exc:
        raise PeerLostError(f"no node answers at {address}: {getattr(exc, 'reason', exc)}; does its job run with "
                            "metrics_port (BPSFAST_METRICS_PORT)?") from exc
