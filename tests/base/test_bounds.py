"""Tests that the code behind each setting accepts the least and the greatest value that its table allows."""
from __future__ import annotations

import select
import socket
import typing

import pytest

from bpsfast.base import settings
from bpsfast.base.settings import Settings, load_with_origins
from bpsfast.base.trace_records import limits
from bpsfast.node import capacity
from bpsfast.node.transport import tcp
from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.messages import encode
from bpsfast.orchestration.priority.send_queue import NicQueue
from bpsfast.pyx import engine as native, ring
from bpsfast.pyx.engine import Engine
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.perf import Mailbox
from tests.support.job_table import join
from tests.support.streams import mailbox, pair, stream

META = {name: kind.__metadata__[0] for name, kind in typing.get_type_hints(Settings, include_extras=True).items()}
NUMBERS = [name for name, value in zip(Settings.__struct_fields__, (getattr(Settings(), name) for name in META))
           if type(value) in (int, float)]


def extremes(name):
    meta = META[name]
    least = meta.ge if meta.ge is not None else 1e-3
    return [least, meta.le]


def as_number(value):
    """It is told, in a message, and compared with others."""
    encode(join("a", 1, nic_rate_bytes=float(value), index=int(value)))


def as_time(value):
    """Poll takes milliseconds in C's int, locks and sockets seconds, native waits nanoseconds."""
    select.poll().poll(0 if value == 0 else min(1, int(1000 * value)))
    with socket.socket() as sock:
        sock.settimeout(value)
    assert int(1000 * value) < 1 << 31
    Mailbox().wait(0, None, value)


def as_lease(value):
    as_time(value)
    with pair() as (left, _):
        tcp.end_when_silent(left, value)


def engine(**options):
    board, bell = Segment(ring.BOARD_NBYTES, populate=False), Segment(ring.DOORBELL_NBYTES)
    ring.format_board(board)
    ring.format_doorbell(bell)
    Engine(board, bell, **{"n_threads": 1, **options}).close()


def as_trace(**values):
    kept = limits(Settings(trace_dir="somewhere", **values))
    engine(**kept._asdict())
    with mailbox() as box, pair() as (left, _):
        stream(box, left, **kept._asdict()).close()


def as_send_buffer(value):
    with mailbox() as box, pair() as (left, _):
        stream(box, left, send_buffer_nbytes=value).close()


def as_threads(value):
    engine(n_threads=capacity.n_summing_threads(Settings(engine_threads=value)))


def as_store(**values):
    native.Engine.drop_store(native.Engine.make_store(1, kernel=1, weights=1, **values))


def as_rate(value):
    found = tcp.pacing_of(Settings(nic_limit=value), 3)
    assert (found is None) == (value == 0)


#: By setting: what takes its value. Those of RDMA go to a device: `tests/guest` has one.
CONSUMERS = {
    **dict.fromkeys(("member", "rank", "size", "local_rank", "local_size", "node_index", "num_nodes", "num_helpers",
                     "max_helpers", "num_servers", "scheduler_index", "pcie_switch_size", "rank_cores", "node_cores",
                     "nic_rate", "sum_rate", "metrics_port", "partition_bytes", "fusion_bytes", "min_compress_bytes",
                     "max_bytes"), as_number),
    **dict.fromkeys(("timeout_s", "stall_warn_s", "start_timeout_s", "heartbeat_s", "helper_lease_s"), as_time),
    "lease_s": as_lease,
    "engine_threads": as_threads, "cores": as_threads,
    "credit_bytes": NicQueue,
    "tcp_streams": lambda value: Settings(tcp_streams=value).n_connections, "tcp_sndbuf_bytes": as_send_buffer,
    "io_threads": lambda value: tcp.io_threads_of(Settings(io_threads=value)).close(),
    "nontemporal_bytes": lambda value: engine(nontemporal_nbytes=value),
    "awake_us": lambda value: engine(awake_us=value),
    "async_staleness": lambda value: as_store(staleness=value), "async_backups": lambda value: as_store(backups=value),
    "nic_limit": as_rate,
    "first_round": as_number, "min_workers": as_number,
    "trace_capacity": lambda value: as_trace(trace_capacity=value),
    "trace_first_step": lambda value: as_trace(trace_first_step=value),
    "trace_last_step": lambda value: as_trace(trace_last_step=value),
}


def test_every_number_has_bounds_or_values_that_are_listed():
    unbounded = {name for name in NUMBERS if META[name].le is None or (META[name].ge is None and META[name].gt is None)}
    assert unbounded == {"rdma_mtu"}, "of which only some values are possible"
    assert {name for name in NUMBERS if not name.startswith("rdma_")} == set(CONSUMERS)


@pytest.mark.parametrize("name", CONSUMERS)
def test_what_a_setting_goes_to_takes_its_least_and_its_most(name):
    for value in extremes(name):
        load_with_origins({name: value, "lease_s": META["lease_s"].le} if name == "heartbeat_s" and value < 1
                          else {}, {})
        CONSUMERS[name](value)


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "rdma_mtu"])
def test_more_and_less_is_refused_in_words(name):
    for value in (META[name].le + 1, float("inf"), float("nan"), -2):
        with pytest.raises(ConfigError, match=f"BPSFAST_{name.upper()} = "):
            load_with_origins({name: str(value)}, {})


def test_an_engine_has_as_many_threads_as_the_setting_takes():
    assert META["engine_threads"].le == META["cores"].le == native.MOST_THREADS == settings.MAX_ENGINE_THREADS
    with pytest.raises(ValueError, match=f"must be 1 to {native.MOST_THREADS}"):
        engine(n_threads=native.MOST_THREADS + 1)


def test_where_byteps_took_more_the_most_is_taken_and_it_is_said(caplog):
    loaded, origins = load_with_origins({}, {"BYTEPS_SERVER_ENGINE_THREAD": "128"})
    assert loaded.engine_threads == settings.MAX_ENGINE_THREADS
    assert origins["engine_threads"] == "BYTEPS_SERVER_ENGINE_THREAD (alias)"
    assert "BYTEPS_SERVER_ENGINE_THREAD = 128 is read as BPSFAST_ENGINE_THREADS = 64" in caplog.text
    with pytest.raises(ConfigError, match="BPSFAST_ENGINE_THREADS = '128'"):
        load_with_origins({}, {"BPSFAST_ENGINE_THREADS": "128"})
