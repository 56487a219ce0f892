"""Reads BytePS's and ps-lite's environment variables as settings, so that programs for BytePS start unchanged.

`ALIASES` maps variables to settings, `launch.environments` reads `ROLE_VARIABLES`, `NO_EFFECT` has the reason why a
variable changes nothing. A log line gives the new names.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..orchestration.errors import ConfigError
from ..orchestration.host_lookup import format_address

_log = logging.getLogger("bpsfast.settings")
_told: set[str] = set()


#: (text of the variable, environment, settings read so far) -> value of the setting, None for "no effect".
_Reader = Callable[[str, Mapping[str, str], Mapping[str, Any]], Any]


class Alias(NamedTuple):
    """The setting that a BytePS variable sets, and how its value follows from the variable: by default it is the same.

    Settings are read in the order of the table.
    """

    setting: str
    value: _Reader = lambda text, environ, values: text


class Translated(NamedTuple):
    """A variable, and the value it gives a setting."""

    variable: str
    value: Any


def _scheduler(text: str, environ: Mapping[str, str], values: Mapping[str, Any]) -> str:
    port = environ.get("DMLC_PS_ROOT_PORT", "")
    if not port:
        raise ConfigError(f"DMLC_PS_ROOT_URI={text!r} is set, DMLC_PS_ROOT_PORT is not: set both or BPSFAST_SCHEDULER")
    return format_address(text.strip("[]"), port)


def _credit(text: str, environ: Mapping[str, str], values: Mapping[str, Any]) -> int | None:
    n_partitions = whole_number("BYTEPS_SCHEDULING_CREDIT", text)
    return n_partitions * values["partition_bytes"] if n_partitions > 0 else None


def _switch_size(text: str, environ: Mapping[str, str], values: Mapping[str, Any]) -> int:
    size = whole_number("BYTEPS_PCIE_SWITCH_SIZE", text)
    if size < 1:
        raise ConfigError(f"BYTEPS_PCIE_SWITCH_SIZE = {text!r}: a switch has one GPU or more")
    return size


def _verbose(text: str, environ: Mapping[str, str], values: Mapping[str, Any]) -> str | None:
    level = whole_number("PS_VERBOSE", text)
    return None if level <= 0 else "INFO" if level == 1 else "DEBUG"


def whole_number(variable: str, text: str) -> int:
    """Return the whole number *text*, the value of *variable*; raise `ConfigError` if it is none."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{variable} = {text!r} is no whole number") from None


def _unless(nothing: str, value: str = "") -> _Reader:
    """Return a reader: no effect for the text *nothing*, else *value*, or the text if that is empty."""
    return lambda text, environ, values: None if text.strip() == nothing else value or text


_LEVELS = {"TRACE": "DEBUG", "DEBUG": "DEBUG", "INFO": "INFO", "ERROR": "ERROR", "FATAL": "CRITICAL"}

#: Variable -> setting; of two variables for one setting, the first one that is set counts.
ALIASES: dict[str, Alias] = {
    "DMLC_PS_ROOT_URI": Alias("scheduler", _scheduler),
    "DMLC_NUM_WORKER": Alias("num_nodes"),
    "DMLC_NUM_SERVER": Alias("num_servers"),
    "DMLC_WORKER_ID": Alias("node_index"),
    "DMLC_NODE_HOST": Alias("node_host"),
    "DMLC_INTERFACE": Alias("interface"),
    "BYTEPS_LOCAL_RANK": Alias("local_rank"),
    "BYTEPS_LOCAL_SIZE": Alias("local_size"),
    "BYTEPS_PARTITION_BYTES": Alias("partition_bytes"),
    "BYTEPS_MIN_COMPRESS_BYTES": Alias("min_compress_bytes"),
    "BYTEPS_SCHEDULING_CREDIT": Alias("credit_bytes", _credit),
    "BYTEPS_SERVER_ENGINE_THREAD": Alias("engine_threads"),
    "BYTEPS_KEY_HASH_FN": Alias("placement", lambda text, environ, values: f"hash:{text}"),
    "BYTEPS_PCIE_SWITCH_SIZE": Alias("pcie_switch_size", _switch_size),
    "BYTEPS_REDUCE_ROOTS": Alias("reduce_roots"),
    "DMLC_ENABLE_RDMA": Alias("transport", lambda text, environ, values: "rdma" if text in ("1", "ibverbs") else None),
    "BYTEPS_ENABLE_IPC": Alias("allow_shm"),
    "BYTEPS_TRACE_ON": Alias("trace_dir", lambda text, environ, values: None if text.strip() == "0" else (
        environ.get("BYTEPS_TRACE_DIR") or "./trace")),
    "BYTEPS_TRACE_START_STEP": Alias(
        "trace_first_step", lambda text, environ, values: text if values["trace_dir"] else None),
    "BYTEPS_TRACE_END_STEP": Alias(
        "trace_last_step", lambda text, environ, values: text if values["trace_dir"] else None),
    "BYTEPS_NUMA_ON": Alias("numa"),
    "BYTEPS_VISIBLE_CPU_CORES": Alias("rank_cpus"),
    "BYTEPS_NUMA_DEFAULT_QUOTA": Alias("rank_cores"),
    "BYTEPS_NUMA_ROOT_QUOTA": Alias("node_cores"),  # BytePS's root does what the node does here
    "BYTEPS_CPU_BLACKLIST": Alias("avoid_cpus", _unless("-1")),
    "BYTEPS_MULTITHREADED_CPU": Alias("whole_cores"),
    "BYTEPS_ENABLE_ASYNC": Alias("async_training"),
    "BYTEPS_LOG_LEVEL": Alias("log_level", lambda text, environ, values: _LEVELS.get(text.upper(), "WARNING")),
    "PS_VERBOSE": Alias("log_level", _verbose),
    "PS_HEARTBEAT_INTERVAL": Alias("heartbeat_s", _unless("0")),
    "PS_HEARTBEAT_TIMEOUT": Alias("lease_s", _unless("0")),
}

#: Further settings of a variable, unless another one sets them: BytePS's own defaults.
IMPLIED: dict[str, tuple[Alias, ...]] = {
    "BYTEPS_TRACE_ON": (Alias("trace_first_step", _unless("0", "10")), Alias("trace_last_step", _unless("0", "20"))),
}

#: Read elsewhere: by `launch.environments`, or together with one of the above.
ROLE_VARIABLES = frozenset({
    "DMLC_ROLE", "DMLC_PS_ROOT_PORT", "BYTEPS_GLOBAL_RANK", "BYTEPS_FORCE_DISTRIBUTED", "BYTEPS_TRACE_DIR"})

#: Variables that ask for something bpsfast does not do: a warning is logged.
NOT_OBEYED = {
    "PS_DROP_MSG": "no message is dropped",
    "DMLC_ENABLE_UCX": "there is no UCX transport",
}

#: Variable -> why it changes nothing.
NO_EFFECT = {
    "BYTEPS_ENABLE_MIXED_MODE": "the optimal placement is always on",
    "BYTEPS_MIXED_MODE_BOUND": "the optimal placement needs no hash buckets",
    "BYTEPS_SERVER_ENABLE_SCHEDULE": "the engine always obeys priorities",
    "BYTEPS_SERVER_ENGINE_BLOCKING": "receiving never waits for sums",
    "BYTEPS_OMP_THREAD_PER_GPU": "see BPSFAST_ENGINE_THREADS",
    "BYTEPS_SOCKET_PATH": "local sockets have abstract names",
    "BYTEPS_ORDERED_HOSTS": "see BPSFAST_NODE_INDEX",
    "BYTEPS_TELEMETRY_ON": "get_pushpull_speed is always on",
    "BYTEPS_NCCL_GROUP_SIZE": "no NCCL",
    "BYTEPS_NCCL_NUM_RINGS": "no NCCL",
    "BYTEPS_IPC_COPY_NUM_THREADS": "shared memory needs no copy",
    "BYTEPS_IPC_ENABLE_ASYNC_COPY": "shared memory needs no copy",
    "DMLC_PORT": "the system chooses data ports",
    "DMLC_NUM_PORTS": "see BPSFAST_TCP_STREAMS",
    "DMLC_USE_KUBERNETES": "the scheduler needs no special case",
    "DMLC_LOCKLESS_QUEUE": "queues between processes have no locks",
    "PS_RESEND": "TCP resends",
    "PS_RESEND_TIMEOUT": "TCP resends",
}


def translate(setting: str, environ: Mapping[str, str], values: Mapping[str, Any]) -> Translated | None:
    """Return what BytePS's variables in *environ* say about *setting*, or None.

    Raises `ConfigError` if a variable has no meaning, or needs another one that is missing.
    """
    implied = [(variable, alias) for variable, aliases in IMPLIED.items() for alias in aliases]
    for variable, alias in [*ALIASES.items(), *implied]:
        text = environ.get(variable, "")
        if alias.setting == setting and text:
            value = alias.value(text, environ, values)
            if value is not None:
                return Translated(variable, value)
    return None


def clamped(said: Translated, setting: str, most: float) -> None:
    """Log, once per process and variable, that the limit *most* replaces a variable's value."""
    if _first_time(f"{said.variable}={said.value}"):
        _log.warning("%s = %s is read as %s = %g: more is not possible", said.variable, said.value, setting, most)


def report(environ: Mapping[str, str], origins: Mapping[str, str]) -> None:
    """Log, once per process and variable, how BytePS's variables are used, with the new names."""
    read = [f"{variable} as BPSFAST_{alias.setting.upper()}" for variable, alias in ALIASES.items()
            if origins.get(alias.setting) == f"{variable} (alias)" and _first_time(variable)]
    if read:
        _log.warning("BytePS variables are read: %s; please use the new names", ", ".join(read))
    for variable, why in NOT_OBEYED.items():
        if environ.get(variable, "0") not in ("", "0") and _first_time(variable):
            _log.warning("%s=%s is not obeyed: %s", variable, environ[variable], why)
    ignored = [f"{variable} ({why})" for variable, why in NO_EFFECT.items()
               if environ.get(variable, "") and _first_time(variable)]
    if ignored:
        _log.info("BytePS variables without effect here: %s", ", ".join(ignored))


def _first_time(variable: str) -> bool:
    if variable in _told:
        return False
    _told.add(variable)
    return True
