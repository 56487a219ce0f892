"""For ``bpsfast top``: one GET to the metrics port of a node, and the parsed values by metric."""
from __future__ import annotations

import http.client
import importlib.util
import time
from collections.abc import Mapping
from typing import NamedTuple

from ...orchestration.errors import LackingError
from ...orchestration.host_lookup import format_address

#: Most bytes of an answer; a node needs about 300 for each rank and peer.
_MOST_NBYTES = 16 << 20


class Value(NamedTuple):
    """One value of a metric, with its labels."""

    labels: Mapping[str, str]
    value: float


class Scrape(NamedTuple):
    """The answer of a node at `time_s` (monotonic): values by metric."""

    time_s: float
    metrics: Mapping[str, tuple[Value, ...]]

    def all(self, name: str, **labels: str) -> list[Value]:
        """Return the values of a metric with these labels."""
        return [each for each in self.metrics.get(name, ())
                if all(each.labels.get(label) == value for label, value in labels.items())]

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of the values of a metric with these labels."""
        return sum(each.value for each in self.all(name, **labels))

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels of the job: the number of this ``node``, the job's unique ``name``, the node's ``version``."""
        return self.metrics["bpsfast_job"][0].labels  # present in all versions

    @property
    def node(self) -> int:
        """The node's number."""
        return int(self.labels["node"])


class NotBpsfastError(ConnectionError):
    """Another program than a node of bpsfast answers at this address."""


def check() -> None:
    """Raise `ConfigError` if the package that parses metrics is missing."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise LackingError("reading metrics needs the package prometheus_client, which is not installed: pip install "
                           "'bpsfast[metrics]'")


def scrape(host: str, port: int, timeout_s: float) -> Scrape:
    """Scrape a node, without any proxy.

    Raises `ConnectionError` if nobody listens or the connection ended (the node is gone), `NotBpsfastError` if another
    program answers, `TimeoutError` if there is no answer in time (the node is busy or stopped, or packets are dropped),
    and `OSError` if the host is unknown or cannot be reached.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/metrics", headers={"Connection": "close"})
        with connection.getresponse() as answer:  # without a length the response would keep the descriptor open
            text = answer.read(_MOST_NBYTES)
    except http.client.HTTPException as exc:
        raise NotBpsfastError(f"{format_address(host, port)} does not speak HTTP: {type(exc).__name__}") from exc
    finally:
        connection.close()
    if answer.status >= 500:  # a node before it has met its peers
        raise TimeoutError(f"{format_address(host, port)} has no metrics yet (HTTP {answer.status})")
    found = Scrape(time.monotonic(), _parsed(text, format_address(host, port)))
    if found.metrics.get("bpsfast_build_info") and not found.metrics.get("bpsfast_member_up"):
        raise TimeoutError(f"{format_address(host, port)} has no metrics yet: its job is starting")
    if not found.metrics.get("bpsfast_job"):
        raise NotBpsfastError(f"{format_address(host, port)} is not a node of bpsfast (HTTP {answer.status})")
    return found


def _parsed(text: bytes, where: str) -> dict[str, tuple[Value, ...]]:
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, list[Value]] = {}
    try:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                if sample.name.startswith("bpsfast_"):
                    found.setdefault(sample.name, []).append(Value(sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as exc:
        raise NotBpsfastError(f"{where} does not answer with metrics: {exc}") from exc
    return {name: tuple(values) for name, values in found.items()}
