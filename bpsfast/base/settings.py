"""Settings: one typed table of all settings, and the origin of each value.

Each field of the class `Settings` has its unit, help and limits. A value comes from the first of

    command line (`overrides`) > BPSFAST_NAME > BytePS's variable (`byteps_variables`) > profile file > default

and an unknown ``BPSFAST_*`` variable is an error. To add a setting, add one field; nothing else is needed.
"""
from __future__ import annotations

import difflib
import os
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from ..orchestration.errors import ConfigError
from ..orchestration.host_lookup import format_address, is_address
from ..orchestration.placement_policy import check_policy
from . import logs, profile as profiles
from .byteps_variables import ALIASES, Translated, clamped, report, translate
from .value_formats import PATH_MTUS, is_cpu_list, parse_cpus, parse_ports, parse_rdma_devices, parse_size

PREFIX = "BPSFAST_"
_KEY = "BPSFAST_JOB_KEY"
_MIN_LIMIT_GBPS = 0.001
_MIN_HELPER_LEASE_S = 0.5
_MAX_TCP_STREAMS = 4
#: Limits of the code that takes the values (`tests/base/test_bounds.py`): threads of an engine, a C int, milliseconds
#: in a C int, a round number. No machine has more than _MAX_BYTES bytes.
MAX_ENGINE_THREADS = 64
_MAX_INT = (1 << 31) - 1
_MAX_ROUND = (1 << 32) - 1
_MAX_SECONDS = 1e6
_MAX_BYTES = 1 << 50
#: Values that errors show without quotes.
_PLAIN = re.compile(r"[\w.:,^=+-]+")
_RANKS = re.compile(r"\s*\d+\s*(,\s*\d+\s*)*")


def _about(doc: str, unit: str = "", *, agree: bool = False, **limits: Any) -> msgspec.Meta:
    """Describe a field. `agree`: all roles of a job must have the same value. `limits`: ge, le, gt, pattern."""
    return msgspec.Meta(description=doc, extra={"unit": unit, "agree": agree}, **limits)


_Transport = Literal["auto", "shm", "tcp", "rdma"]
_Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
_Form = Literal["text", "json"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of one process, read once and never changed. Where -1 is not a legal value it means unset."""

    # the process's place in the job: set by a launcher, see `launch.roles`
    scheduler: Annotated[str, _about(
        "address that the scheduler listens on, or a list: the job starts at the first one, a scheduler at a further "
        "one takes over when the one before is lost", "host:port,...")] = ""
    scheduler_index: Annotated[int, _about(
        "which address of the list BPSFAST_SCHEDULER this scheduler listens on, from 0 on; -1: the first one that is "
        "an address of this machine", ge=-1, le=_MAX_INT)] = -1
    coordinator: Annotated[str, _about(
        "address of the coordinator of an elastic job; set by `bpsfast run --elastic`", "host:port")] = ""
    member: Annotated[int, _about("number of this worker in an elastic job", ge=-1, le=_MAX_INT)] = -1
    rank: Annotated[int, _about("number of this rank in the job", ge=-1, le=_MAX_INT)] = -1
    size: Annotated[int, _about("number of ranks in the job", ge=-1, le=_MAX_INT)] = -1
    local_rank: Annotated[int, _about("number of this rank on its machine", ge=-1, le=_MAX_INT)] = -1
    local_size: Annotated[int, _about(
        "number of ranks on this machine; 0 makes the node a helper", ge=-1, le=_MAX_INT)] = -1
    node_id: Annotated[str, _about(
        "name of this machine; nodes with different names on one host count as several machines")] = "machine"
    node_index: Annotated[int, _about(
        "preferred index of this node in the order of the nodes", ge=-1, le=_MAX_INT)] = -1
    num_nodes: Annotated[int, _about("number of machines with ranks", ge=-1, le=_MAX_INT)] = -1
    num_helpers: Annotated[int, _about(
        "number of helpers (machines that only sum) that the job waits for at the start", ge=0, le=_MAX_INT)] = 0
    max_helpers: Annotated[int, _about(
        "most helpers in a running job, including those that join later; read by the scheduler; 0: num_helpers",
        ge=0, le=_MAX_INT)] = 0
    num_servers: Annotated[int, _about(
        "number of server processes as BytePS counts them, also on machines with ranks", ge=-1, le=_MAX_INT)] = -1
    node_host: Annotated[str, _about("address of this node that peers connect to", "host")] = ""
    interface: Annotated[str, _about(
        "network interface whose address peers connect to, or a list as NCCL_SOCKET_IFNAME has, such as ib,eth (the "
        "first that there is) or ^docker,lo (all but)")] = ""
    advertise: Annotated[str, _about(
        "IP address at which other machines reach this node and its ranks, if that is not one of this machine; port "
        "numbers must be the same", "address")] = ""
    ports: Annotated[str, _about(
        "ports at which nodes and ranks listen for each other, such as 30000-30999, not the scheduler's; empty: any",
        "first-last")] = ""
    job_key: Annotated[str, _about("secret that all processes of the job share", "hex")] = ""
    job_key_file: Annotated[str, _about("file that holds the job key", "path")] = ""
    insecure: Annotated[bool, _about(
        "allow jobs and listeners on several machines without a job key; anyone who reaches their ports can then join, "
        "read and change sums", agree=True)] = False
    encryption: Annotated[Literal["auto", "on", "off"], _about(
        "encrypt gradients and messages between machines with AES-256-GCM; auto: encrypt tcp unless insecure is set; "
        "on: encrypt everything, so RDMA is not used", agree=True)] = "auto"
    checksum: Annotated[Literal["off", "on"], _about(
        "send a CRC32C with each unencrypted partition over tcp and resend the partition over new connections if it "
        "does not match; costs about 0.07 CPU seconds per GB at each end", agree=True)] = "off"

    # where sums are made, and how data travels
    transport: Annotated[_Transport, _about(
        "how nodes exchange data; auto chooses for each pair of nodes", agree=True)] = "auto"
    allow_shm: Annotated[bool, _about("allow two nodes on one host to share memory", agree=True)] = True
    placement: Annotated[str, _about(
        "which machine sums which partition: optimal, colocated, ps, hash:NAME", agree=True)] = "optimal"
    partition_bytes: Annotated[int, _about(
        "largest partition of a tensor; in a job on one machine, partitions of a single CPU tensor are at most 512 KiB",
        "bytes", agree=True, ge=4096, le=_MAX_BYTES)] = 4_096_000
    fusion_bytes: Annotated[int, _about(
        "largest bucket of small tensors that are sent together", "bytes", agree=True, ge=0, le=_MAX_BYTES)] = 4_096_000
    min_compress_bytes: Annotated[int, _about(
        "smallest tensor that is compressed; smaller ones never are",
        "bytes", agree=True, ge=0, le=_MAX_BYTES)] = 65_536
    credit_bytes: Annotated[int, _about(
        "most bytes in flight to one peer", "bytes", ge=4096, le=_MAX_BYTES)] = 16_777_216
    scheduling: Annotated[Literal["priority", "fifo"], _about(
        "order in which partitions are summed and sent; priority: what the next forward pass needs first; fifo: in "
        "order of arrival", agree=True)] = "priority"
    tcp_streams: Annotated[int, _about(
        "TCP connections to each peer; partitions are spread over them", agree=True, ge=1, le=_MAX_TCP_STREAMS)] = 2
    tcp_sndbuf_bytes: Annotated[int, _about(
        "kernel send buffer of a connection; 0: chosen by whether the peer is on this host",
        "bytes", ge=0, le=1 << 30)] = 0
    io_threads: Annotated[int, _about(
        "native threads that send and receive over TCP, for all peers together; 0: half of the cores, 4 to 8",
        ge=0, le=64)] = 0
    io_backend: Annotated[Literal["epoll", "io_uring"], _about(
        "how these threads wait for sockets; io_uring needs Linux 6.1")] = "epoll"
    rdma_devices: Annotated[str, _about(
        "RDMA devices to use, in the syntax of NCCL_IB_HCA: mlx5 (prefix), =mlx5_0:1, ^mlx5_1; empty: all active "
        "ports, which pair up with the peer's by network or by number")] = ""
    verbs: Annotated[Literal["native", "pyverbs"], _about(
        "implementation of RDMA verbs: native (this package) or pyverbs (rdma-core's Python binding)")] = "native"
    rdma_gid_index: Annotated[int, _about(
        "row of the GID table, as NCCL_IB_GID_INDEX; -1: chosen by address and RoCE version", ge=-1, le=255)] = -1
    rdma_queue_pairs: Annotated[int, _about(
        "queue pairs to each peer on each RDMA device; more of them allow more partitions in flight", ge=1, le=64)] = 1
    rdma_queue_depth: Annotated[int, _about(
        "most writes posted to a queue pair at a time; further writes wait in memory", ge=1, le=16_384)] = 128
    rdma_inline_bytes: Annotated[int, _about(
        "largest write that is copied into the work request", "bytes", ge=0, le=4096)] = 0
    rdma_signal_every: Annotated[int, _about("request a completion every N queued writes", ge=1, le=1024)] = 1
    rdma_mtu: Annotated[int, _about("largest RDMA path MTU; 0: the smaller one of the two ports", "bytes", ge=0)] = 0
    rdma_traffic_class: Annotated[int, _about("traffic class of RoCE v2 packets: DSCP * 4", ge=0, le=255)] = 0
    rdma_service_level: Annotated[int, _about("service level (InfiniBand) or priority (RoCE)", ge=0, le=15)] = 0
    rdma_grh: Annotated[bool, _about(
        "InfiniBand packets have a global route header within one subnet, too, which virtual functions (SR-IOV) and "
        "adaptive routing may need; the same on all nodes; not yet proven on InfiniBand")] = False
    rdma_pkey: Annotated[int, _about(
        "partition key (InfiniBand), such as 32769 for 0x8001; 0: the first one of each port's table",
        ge=0, le=0xFFFF)] = 0
    rdma_timeout: Annotated[int, _about(
        "time until an unanswered packet is sent again, 4.096 us * 2^N, as NCCL_IB_TIMEOUT (17: 0.54 s)", ge=1, le=31
    )] = 17
    rdma_retries: Annotated[int, _about(
        "how often it is sent again before the peer is given up, as NCCL_IB_RETRY_CNT; 7 means for ever to Soft-RoCE",
        ge=0, le=7)] = 6
    rdma_relaxed_ordering: Annotated[bool, _about("allow PCIe to reorder the writes of RDMA devices")] = False
    rdma_completion_vector: Annotated[int, _about(
        "completion vector (interrupt) of each RDMA device that wakes the node; -1: the process id modulo their "
        "number; its benefit is not yet proven on a card", ge=-1, le=4095)] = 0
    rdma_cores: Annotated[str, _about(
        "cores of the thread of each RDMA device: 3 or 4-7; numa: those near the device; empty: any")] = ""
    nic_rate: Annotated[float, _about(
        "rate of this machine's network card; 0: the rate that the kernel reports for its RDMA ports, or else for the "
        "interface with this node's address if it is not virtual; if it is unknown, the least known rate of the other "
        "machines; if none is known, all machines count as equal", "Gbit/s", ge=0, le=10_000)] = 0.0
    nic_probe: Annotated[bool, _about(
        "at the start, measure the rate of network cards whose rate is unknown", agree=True)] = False
    sum_rate: Annotated[float, _about(
        "rate of input that this node can sum; 0: measured at the start if cores are limited, else assumed to exceed "
        "the rate of its network card", "Gbit/s", ge=0, le=10_000)] = 0.0
    engine_threads: Annotated[int, _about(
        "summing threads; 0: one per core, at most 8", ge=0, le=MAX_ENGINE_THREADS)] = 0
    nontemporal_bytes: Annotated[int, _about(
        "smallest partition that is summed with non-temporal stores, which bypass the caches; in a job on one machine "
        "16 MiB for a tensor that is pushed as a whole", "bytes", ge=0, le=_MAX_BYTES)] = 1_048_576
    awake_us: Annotated[int, _about(
        "how long a waiting thread yields its core before it sleeps; a rank waits four times as long while its waits "
        "end within that time", "us", ge=0, le=10_000)] = 50
    direct_sums: Annotated[Literal["auto", "off"], _about(
        "auto: the ranks of a job on one machine themselves carry out collectives of groups, and push_pulls that wait, "
        "in shared memory; off: their node does", agree=True)] = "auto"
    sums: Annotated[Literal["on", "off"], _about(
        "off: skip the sums, so results are wrong (for benchmarks only)", agree=True)] = "on"
    huge_pages: Annotated[Literal["auto", "off"], _about(
        "use huge pages, if available, for shared memory, and for large tensors that the ranks of a machine sum "
        "again and again")] = "auto"
    max_bytes: Annotated[int, _about(
        "most memory for the segments of a machine; 0: all it has", "bytes", ge=0, le=_MAX_BYTES)] = 0

    host_device: Annotated[bool, _about(
        "treat CPU tensors as tensors of a device, which streams copy as they copy a GPU's; for tests and "
        "demonstrations of that path without a GPU")] = False

    # how the GPUs of a machine sum: see `bpsfast topo --strategy`
    islands: Annotated[Literal["off", "auto"], _about(
        "sum between the GPUs of a machine with NCCL first, as `bpsfast topo --strategy` shows; not yet proven on a "
        "machine with GPUs", agree=True)] = "off"
    pcie_switch_size: Annotated[int, _about(
        "number of GPUs that sum with each other first, such as those below one PCIe switch; 0: by the machine's "
        "topology", "GPUs", ge=0, le=_MAX_INT)] = 0
    reduce_roots: Annotated[str, _about(
        "local ranks whose GPUs copy sums to host memory and back, such as 2,3; empty: by the machine's topology")] = ""
    gpu_direct: Annotated[bool, _about(
        "allow GPUs to pass sums directly to a network card below the same PCIe switch (GPUDirect); not yet measured "
        "on a machine with GPUs")] = False

    torch_autoload: Annotated[bool, _about(
        "register the backend bpsfast with torch.distributed without an import; read by `import torch`")] = False

    async_training: Annotated[bool, _about(
        "let DistributedOptimizer step on each machine independently and push weight changes instead of gradients",
        agree=True)] = False
    async_staleness: Annotated[int, _about(
        "most steps that the slowest machine may be behind the others; -1: no limit",
        "steps", agree=True, ge=-1, le=_MAX_INT)] = -1
    async_backups: Annotated[int, _about(
        "number of machines that the others do not wait for; machines then step together and late changes are dropped; "
        "-1: no common steps", agree=True, ge=-1, le=_MAX_INT)] = -1

    # tuning while the job trains
    autotune: Annotated[bool, _about(
        "tune partition_bytes, fusion_bytes, credit_bytes and tcp_streams on the first model while it trains",
        agree=True)] = False
    tuned_dir: Annotated[str, _about(
        "folder for tuning results by model and cluster; empty: bpsfast/tuned in the user's cache folder", "path")] = ""
    autotune_report: Annotated[str, _about(
        "file that rank 0 writes after every trial; if set, the job always tunes, even if a result is stored",
        "path")] = ""

    # limits of a node on a machine that other programs use
    cores: Annotated[int, _about("CPUs and summing threads of the node; 0: all", ge=0, le=MAX_ENGINE_THREADS)] = 0
    cpus: Annotated[str, _about(
        "CPUs that cores are taken from: 3 or 4-7; empty: the idlest CPUs of one NUMA node")] = ""
    nice: Annotated[bool, _about(
        "run only when no other process wants the CPU (SCHED_IDLE), and block instead of yielding")] = False
    nic_limit: Annotated[float, _about(
        "highest rate at which this node sends, and at which it receives; its peers then use tcp; 0: no limit",
        "Gbit/s", ge=0, le=10_000)] = 0.0

    # CPU and memory affinity on a machine with several NUMA nodes
    numa: Annotated[bool, _about(
        "on a machine with several NUMA nodes, bind ranks to cores of their own, node threads near the network card "
        "and memory near its users, unless something else has bound them")] = True
    rank_cpus: Annotated[str, _about(
        "CPUs of each local rank, such as 0-3,8:4-7,9; empty: equal shares of the cores, those near the rank's GPU "
        "first")] = ""
    rank_cores: Annotated[int, _about("cores of each rank; 0: an equal share", ge=0, le=_MAX_INT)] = 0
    node_cores: Annotated[int, _about(
        "cores that only the node uses, near its network card; 0: the node shares all cores with the ranks",
        ge=0, le=_MAX_INT)] = 0
    avoid_cpus: Annotated[str, _about("CPUs that neither ranks nor the node use: 3 or 3,7-9")] = ""
    whole_cores: Annotated[bool, _about(
        "assign all CPUs of a core (hyperthreads) together; off: count each CPU as a core")] = True

    # deadlines, traces, metrics, logs
    timeout_s: Annotated[float, _about("deadline of an operation", "s", gt=0, le=_MAX_SECONDS)] = 300.0
    stall_warn_s: Annotated[float, _about(
        "time after which a waiting rank logs which tensor, which stage and who is missing, and again each time the "
        "wait has doubled; 0: never", "s", ge=0, le=_MAX_SECONDS)] = 60.0
    start_timeout_s: Annotated[float, _about(
        "deadline for all processes of the job to connect, and for a new scheduler to take over after one is lost",
        "s", gt=0, le=_MAX_SECONDS)] = 60.0
    heartbeat_s: Annotated[float, _about("time between two heartbeats", "s", agree=True, gt=0, le=_MAX_SECONDS)] = 1.0
    lease_s: Annotated[float, _about(
        "silence after which a node counts as lost", "s", agree=True, gt=0, le=_MAX_SECONDS)] = 10.0
    helper_lease_s: Annotated[float, _about(
        "silence, of its native threads too, after which a helper counts as lost; 0: lease_s",
        "s", agree=True, ge=0, le=_MAX_SECONDS)] = 1.0
    on_worker_loss: Annotated[Literal["abort", "continue"], _about(
        "abort: the loss of a rank, or of a machine with ranks, ends the job with an error on all ranks; continue: the "
        "remaining ranks finish the step, and go on", agree=True)] = "abort"
    min_workers: Annotated[int, _about(
        "fewest ranks that go on after a loss, if on_worker_loss is continue; a loss that leaves fewer ends the job",
        agree=True, ge=1, le=_MAX_ROUND)] = 1
    first_round: Annotated[int, _about(
        "number of the first round of each tensor; a value near 4294967295 tests the wrap-around of counters",
        ge=0, le=_MAX_ROUND)] = 1
    trace_dir: Annotated[str, _about("folder for Chrome traces; empty: no trace", "path")] = ""
    trace_capacity: Annotated[int, _about(
        "most trace records kept for each rank, engine and connection", ge=1, le=1 << 24)] = 65_536
    trace_first_step: Annotated[int, _about(
        "first step to trace; each tensor counts its steps from 1", ge=1, le=_MAX_ROUND)] = 1
    trace_last_step: Annotated[int, _about("last step to trace; 0: to the end of the job", ge=0, le=_MAX_ROUND)] = 0
    metrics_port: Annotated[int, _about(
        "port where each node serves metrics of itself and its ranks to Prometheus; further nodes of a host use the "
        "next ports; 0: none", ge=0, le=65_535)] = 0
    metrics_host: Annotated[str, _about("address that metrics_port listens on", "host")] = "127.0.0.1"
    metrics_textfile: Annotated[str, _about(
        "file for node-exporter with the same metrics, written every 5 s and at the end; {node} in it becomes the "
        "node's number; empty: none", "path")] = ""
    log_level: Annotated[_Level, _about("least severe messages to show")] = "WARNING"
    log_format: Annotated[_Form, _about(
        "text: one line for each message; json: one JSON object for each message, and under `bpsfast run` for each "
        "line of output")] = "text"
    profile: Annotated[str, _about("TOML file with settings", "path")] = ""

    @property
    def expects_helpers(self) -> bool:
        """Whether helpers may join, at the start or later: processes that know the scheduler's address and the key."""
        return self.num_helpers > 0 or self.max_helpers > 0

    @property
    def n_connections(self) -> int:
        """Number of TCP connections to each peer; with autotune all, as more than `tcp_streams` may be better."""
        return _MAX_TCP_STREAMS if self.autotune else self.tcp_streams


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    name: str
    variable: str
    kind: str
    unit: str
    default: Any
    doc: str
    aliases: tuple[str, ...]
    agree: bool


_TYPES = typing.get_type_hints(Settings, include_extras=True)
_NAMES = Settings.__struct_fields__
_DEFAULTS = {name: getattr(Settings(), name) for name in _NAMES}


def table() -> tuple[Setting, ...]:
    """Return every setting, in the order of the class."""
    return tuple(_row(name) for name in _NAMES)


def _row(name: str) -> Setting:
    annotated = _TYPES[name]
    meta = annotated.__metadata__[0]
    choices = typing.get_args(annotated.__origin__)
    aliases = tuple(variable for variable, alias in ALIASES.items() if alias.setting == name)
    kind = "|".join(choices) if choices else annotated.__origin__.__name__
    return Setting(name=name, variable=PREFIX + name.upper(), kind=kind, unit=meta.extra["unit"],
                   default=_DEFAULTS[name], doc=meta.description, aliases=aliases, agree=meta.extra["agree"])


def load(overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of this process (see `load_with_origins`); set the log's level, log BytePS's variables."""
    settings, origins = load_with_origins(overrides, environ)
    logs.configure(settings.log_level, form=settings.log_format)
    report(os.environ if environ is None else environ, origins)
    return settings


def load_with_origins(overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
                      ) -> tuple[Settings, dict[str, str]]:
    """Return the settings and, by name, where each value came from.

    Raises `ConfigError` if a name is unknown, a value has the wrong type or exceeds its limits, or two values
    contradict each other.

    *overrides* are values of the command line by name, typed or as text; None values are ignored. *environ* is the
    environment, `os.environ` if None; an empty variable counts as not set.
    """
    if environ is None or environ is os.environ:
        environ = {_KEY: _taken_key, **os.environ} if _taken_key and not os.environ.get(_KEY) else os.environ
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    for name in given:
        _known(name, name, "the command line")
    variables = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value != ""}
    for variable in variables:
        _known(variable.removeprefix(PREFIX).lower(), variable, "the environment")
    profile_path = str(given.get("profile", variables.get(PREFIX + "PROFILE", "")))
    profile = profiles.read(profile_path) if profile_path else {}
    for name in profile:
        _known(name, name, f"the profile {profile_path}")

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name in _NAMES:
        variable = PREFIX + name.upper()
        if name in given:
            raw, origin = given[name], "command line"
        elif variable in variables:
            raw, origin = variables[variable], variable
        else:
            alias = translate(name, environ, values)
            if alias is not None:
                raw, origin = _within(name, alias), f"{alias.variable} (alias)"
            elif name in profile:
                raw, origin = profile[name], f"profile {profile_path}"
            else:
                raw, origin = _DEFAULTS[name], "default"
        values[name] = _typed(name, raw, origin)
        origins[name] = origin
    settings = Settings(**values)
    _check_together(settings, origins)
    return settings, origins


_taken_key = ""


def take_job_key() -> None:
    """Move BPSFAST_JOB_KEY from this process's environment into its memory, where only this module reads it.

    Call it when a process has joined its job, so that child processes (loaders, trackers, crash reporters) do not get
    the key. `load` still finds it, here and in forks of this process, unless the variable is set again. New members of
    the job, nodes and schedulers, get the key by `environment`.
    """
    global _taken_key
    _taken_key = os.environ.pop(_KEY, "") or _taken_key


def fingerprint(settings: Settings) -> dict[str, str]:
    """Return the settings that must be equal for all roles of a job, as text."""
    return {row.name: _text(getattr(settings, row.name)) for row in table() if row.agree}


def environment(settings: Settings) -> dict[str, str]:
    """Return the ``BPSFAST_*`` variables with which a child process loads these settings, including the job key."""
    return {PREFIX + name.upper(): _text(getattr(settings, name)) for name in _NAMES
            if getattr(settings, name) != _DEFAULTS[name] and name != "profile"}


def parse_address(text: str, origin: str = "BPSFAST_SCHEDULER") -> tuple[str, int]:
    """Return host and port of ``host:port`` (``[v6]:port`` for IPv6).

    Raises `ConfigError` if *text* is not an address; *origin* says where it comes from.
    """
    host, colon, port = text.rpartition(":")
    is_bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or is_bare or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{origin} gives {text!r} as an address: expected host:port with a port up to 65535, an IPv6 "
                          "address in brackets")
    return host, int(port)


def parse_addresses(text: str, origin: str = "BPSFAST_SCHEDULER") -> list[tuple[str, int]]:
    """Return the addresses of a list ``host:port,host:port,...``, each as `parse_address`.

    Raises `ConfigError` if one of them is not an address, or stands there twice.
    """
    found = [parse_address(each.strip(), origin) for each in text.split(",")]
    twice = next((each for number, each in enumerate(found) if each in found[:number]), None)
    if twice is not None:
        raise ConfigError(f"{origin} = {text!r} has the address {format_address(*twice)} twice: name each once")
    return found


def format_addresses(addresses: Sequence[tuple[str, int]]) -> str:
    """Return *addresses* as a list that `parse_addresses` reads."""
    return ",".join(format_address(*each) for each in addresses)


def first_address(text: str) -> str:
    """Return the first address of a list, which stands for the job: processes may know different parts of the rest."""
    return format_address(*parse_addresses(text)[0])


def _known(name: str, spelled: str, where: str) -> None:
    if name in _NAMES:
        return
    near = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.6)
    spell = (lambda n: PREFIX + n.upper()) if spelled.startswith(PREFIX) else str
    hint = f"did you mean {spell(near[0])}?" if near else "`bpsfast env` lists all settings"
    raise ConfigError(f"{where} sets {spelled}, which is not a setting of bpsfast: {hint}")


def _within(name: str, alias: Translated) -> Any:
    """Return the value of BytePS's variable, limited to the largest value of the setting."""
    most = _TYPES[name].__metadata__[0].le
    if most is None or not str(alias.value).strip().isdecimal() or int(alias.value) <= most:
        return alias.value
    clamped(alias, PREFIX + name.upper(), most)
    return most


def _typed(name: str, raw: Any, origin: str) -> Any:
    text = raw.strip() if isinstance(raw, str) else raw
    if name == "log_level" and isinstance(text, str):
        text = text.upper()
    row = _row(name)
    if row.unit == "bytes" and isinstance(text, str):
        nbytes = parse_size(text)
        text = text if nbytes is None else nbytes
    try:
        return msgspec.convert(text, _TYPES[name], strict=False)
    except msgspec.ValidationError as exc:
        shown = "(hidden)" if name == "job_key" else repr(raw)
        unit = f" in {row.unit}" if row.unit else ""
        unit += " (or with K, M, G: powers of 1024, such as 4M)" if row.unit == "bytes" else ""
        raise ConfigError(f"{row.variable} = {shown} (from {origin}): {exc}; expected {row.kind}{unit}: {row.doc}"
                          ) from exc


def _check_together(settings: Settings, origins: dict[str, str]) -> None:
    def shown(name: str) -> str:
        text = _text(getattr(settings, name))
        return f"BPSFAST_{name.upper()} = {text if _PLAIN.fullmatch(text) else repr(text)} ({origins[name]})"

    def require(holds: object, name: str, text: str) -> None:
        if not holds:
            raise ConfigError(f"{shown(name)}{text}")

    parse_ports(settings.ports)
    require(not settings.advertise or is_address(settings.advertise), "advertise",
            " is no IP address: name one at which the other machines reach this one")
    require(not (settings.insecure and settings.encryption == "on"), "encryption",
            f" contradicts {shown('insecure')}: encryption needs the job's key; unset one of them")
    require(settings.lease_s > 2 * settings.heartbeat_s, "lease_s",
            f" must be more than twice {shown('heartbeat_s')}: otherwise one late heartbeat ends the job")
    require(settings.helper_lease_s == 0 or settings.helper_lease_s >= _MIN_HELPER_LEASE_S, "helper_lease_s",
            f" must be at least {_MIN_HELPER_LEASE_S}, or 0 for the value of BPSFAST_LEASE_S: the scheduler checks "
            "five times a second, so slow helpers would be lost")
    require(settings.trace_last_step == 0 or settings.trace_last_step >= settings.trace_first_step, "trace_first_step",
            f" comes after {shown('trace_last_step')}: no step would be traced")
    require(not (settings.autotune and settings.trace_dir), "autotune",
            f" contradicts {shown('trace_dir')}: tuning reuses partition numbers, which a trace cannot tell apart. "
            "Tune first, then trace with the tuned settings")
    for name, excluded in (("autotune", settings.autotune), ("async_training", settings.async_training),
                           ("gpu_direct", settings.gpu_direct)):
        require(settings.on_worker_loss == "abort" or not excluded, "on_worker_loss",
                f" contradicts {shown(name)}: that does not survive the loss of a rank; unset one of them")
    check_policy(settings.placement)
    require(not settings.reduce_roots or _RANKS.fullmatch(settings.reduce_roots), "reduce_roots",
            ": expected local ranks such as 2,3")
    try:
        parse_rdma_devices(settings.rdma_devices)
    except ValueError as exc:
        raise ConfigError(f"{shown('rdma_devices')}: {exc}") from exc
    require(settings.rdma_mtu in (0, *PATH_MTUS), "rdma_mtu",
            f": expected a path MTU ({', '.join(map(str, sorted(PATH_MTUS)))}), or 0 for the smaller of both ports'")
    require(settings.rdma_cores in ("", "numa") or parse_cpus(settings.rdma_cores), "rdma_cores",
            ": expected CPUs such as 3 or 4-7, numa, or an empty value")
    require(not settings.cpus or (parse_cpus(settings.cpus) and settings.cores), "cpus",
            f": expected CPUs such as 3 or 4-7, and the number of them to use in BPSFAST_CORES, but {shown('cores')}")
    for name, given in (("rank_cpus", settings.rank_cpus.split(":")), ("avoid_cpus", [settings.avoid_cpus])):
        more = ", for each local rank, with : between them" if name == "rank_cpus" else ""
        require(not getattr(settings, name) or all(map(is_cpu_list, given)), name,
                f": expected CPUs such as 3 or 4-7,9{more}")
    require(settings.nic_limit == 0 or settings.nic_limit >= _MIN_LIMIT_GBPS, "nic_limit",
            f" is in Gbit/s and at least {_MIN_LIMIT_GBPS:g}: with less, one partition takes minutes")
    require(not (settings.nic_limit and settings.transport == "rdma"), "nic_limit",
            f" applies to tcp connections, which {shown('transport')} does not use: use transport auto or tcp")
    if settings.scheduler:
        n_addresses = len(parse_addresses(settings.scheduler, f"BPSFAST_SCHEDULER ({origins['scheduler']})"))
        require(settings.scheduler_index < n_addresses, "scheduler_index",
                f": {shown('scheduler')} has {n_addresses} addresses, counted from 0")
    require(settings.transport != "shm" or settings.allow_shm, "transport", f" contradicts {shown('allow_shm')}")


def _text(value: Any) -> str:
    return str(int(value) if isinstance(value, bool) else value)
