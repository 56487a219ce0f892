"""The fields, with types, of ``--json`` of each command. A change here affects users' programs."""
from __future__ import annotations

from typing import Any, Literal

import msgspec


class Exact(msgspec.Struct, forbid_unknown_fields=True):
    """Base of structs without unknown fields."""


class Error(Exact):
    class Said(Exact):
        text: str
        kind: str = msgspec.field(name="class")

    error: Said


class Version(Exact):
    version: str


class Pcie(Exact):
    address: str
    transfers_per_s: float
    width: int
    max_transfers_per_s: float
    max_width: int
    bits_per_s: float
    max_bits_per_s: float


class Port(Exact):
    number: int
    state: str
    phys_state: str
    rate_bits_per_s: float | None
    link_layer: str
    lid: int | None
    sm_lid: int | None
    netdev: str | None
    netdev_mtu: int | None
    roce_mtu: int | None
    use: Literal["used", "spare", "rejected"]
    reason: str


class Device(Exact):
    name: str
    driver: str
    kind: str
    firmware: str | None
    numa_node: int | None
    local_cpus: str | None
    uverbs: str | None
    pcie: Pcie | None
    ports: list[Port]


class Card(Exact):
    netdev: str
    state: str
    mtu: int
    driver: str | None
    speed_bits_per_s: float | None
    numa_node: int | None
    pcie: Pcie | None
    addresses: list[str]


class Devices(Exact):
    devices: list[Device]
    cards: list[Card]


class Gid(Exact):
    device: str
    port: int
    index: int
    gid: str
    ipv4: str | None
    version: str
    netdev: str | None
    used: bool


class Doctor(Exact):
    class Found(Exact):
        class Action(Exact):
            where: str
            command: str

        code: str
        title: str
        severity: Literal["blocks", "slow", "informs"]
        status: Literal["PASS", "FAIL", "WARN", "INFO", "SKIP"]
        found: str
        why: str
        cause: str
        actions: list[Action]

    version: str
    host: str
    kernel: str
    user: str
    uid: int
    container: str | None
    peer: str | None
    transport: str
    blocked: list[str]
    findings: list[Found]


class Strategy(Exact):
    class Way(Exact):
        class Copied(Exact):
            root: str
            socket: str
            part: float

        share: float
        islands: list[list[str]]
        copied: list[Copied]

    class Load(Exact):
        a: str
        b: str
        kind: str
        load: float

    class Direct(Exact):
        class Pair(Exact):
            gpu: str
            card: str
            reason: str

        on: bool
        pairs: list[Pair]

    machine: str
    service: float
    seconds_per_byte: float
    bound_seconds_per_byte: float
    rule_seconds_per_byte: float | None
    ways: list[Way]
    forced: Any
    links: list[Load]
    cards: dict[str, float]
    gpu_direct: Direct


class Cores(Exact):
    class CpuAffinity(Exact):
        cpus: str
        home: int | None

    nodes: dict[str, str]
    allowed: str
    cards: list[str]
    why_not: str
    node: CpuAffinity
    ranks: list[CpuAffinity]


class Explanation(Exact):
    class Line(Exact):
        label: str
        text: str

    head: str
    lines: list[Line]


class Plan(Exact):
    class Model(Exact):
        name: str
        title: str
        n_parameters: int
        n_tensors: int
        dtype: str
        nbytes: int

    class Compute(Exact):
        forward_s: float
        backward_s: float
        batch: int
        hardware: str

    class Machine(Exact):
        role: str
        bits_per_s: float
        sum_bits_per_s: float | None

    class Layout(Exact):
        layout: str
        formula_s: float
        placed_s: float | None
        n_parts: int | None
        step_s: float | None

    class Bottleneck(Exact):
        machine: str
        what: str
        time_s: float
        owned_nbytes: int

    class Loss(Exact):
        machine: str
        placed_s: float
        moved_nbytes: int

    class Helpers(Exact):
        class Time(Exact):
            n: int
            time_s: float

        there: int
        last_that_pays: int
        last_that_shortens_the_step: int | None
        communication: list[Time]

    model: Model
    compute: Compute | None
    machines: list[Machine]
    layouts: list[Layout]
    bottleneck: Bottleneck
    worst_loss: Loss | None
    helpers: Helpers
    compression: Any
    warnings: list[str]


class Simulated(Exact):
    class Result(Exact):
        strategy: str
        step_s: float
        first_step_s: float
        compute_s: float
        efficiency: float
        folded: bool
        events: int
        steps: int

    model: str
    gradient_bytes: int
    workers: int
    helpers: int
    nic_rate_bytes_per_s: float
    results: list[Result]


class Pinged(Exact):
    host: str
    port: int
    error: str
    tcp: Any
    pairs: list[Any]
    rejected: dict[str, str]


class Started(Exact):
    class Host(Exact):
        class Process(Exact):
            name: str
            kind: Literal["rank", "daemon", "helper"]
            argv: list[str]
            environ: dict[str, str]

        name: str
        folder: str
        agent: list[str]
        processes: list[Process]

    hosts: list[Host]


class Left(Exact):
    class StaleResource(Exact):
        kind: Literal["process", "namespace", "folder"]
        name: str
        owner_pid: int
        about: str
        removed: bool
        reason: str

    stale_resources: list[StaleResource]


class Report(Exact):
    class File(Exact):
        name: str
        nbytes: int
        lines: int
        about: str

    class LeftOut(Exact):
        name: str
        reason: str

    path: str | None
    nbytes: int | None
    files: list[File]
    left_out: list[LeftOut]
    replaced: dict[str, int]


class Merged(Exact):
    path: str
    events: int
    processes: int
    clocks: str


class Added(Exact):
    asked: int
    added: int
    reason: str
