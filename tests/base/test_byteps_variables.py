"""Tests what each of BytePS's variables means here, and that the log says so once."""

from __future__ import annotations

import logging

import pytest

from bpsfast.base import byteps_variables
from bpsfast.base.settings import Settings, load, load_with_origins
from bpsfast.orchestration.errors import ConfigError


@pytest.mark.parametrize(
    "environ, name, value",
    [
        ({"DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "1234"}, "scheduler", "10.0.0.1:1234"),
        ({"DMLC_NUM_WORKER": "3"}, "num_nodes", 3),
        ({"DMLC_NUM_SERVER": "2"}, "num_servers", 2),
        ({"DMLC_WORKER_ID": "1"}, "node_index", 1),
        ({"DMLC_NODE_HOST": "10.0.0.2"}, "node_host", "10.0.0.2"),
        ({"DMLC_INTERFACE": "eth1"}, "interface", "eth1"),
        ({"BYTEPS_LOCAL_RANK": "1"}, "local_rank", 1),
        ({"BYTEPS_LOCAL_SIZE": "4"}, "local_size", 4),
        ({"BYTEPS_PARTITION_BYTES": "8192"}, "partition_bytes", 8192),
        ({"BYTEPS_MIN_COMPRESS_BYTES": "1024000"}, "min_compress_bytes", 1_024_000),
        ({"BYTEPS_SCHEDULING_CREDIT": "4"}, "credit_bytes", 4 * 4_096_000),
        ({"BYTEPS_SCHEDULING_CREDIT": "4", "BPSFAST_PARTITION_BYTES": "8192"}, "credit_bytes", 4 * 8192),
        ({"BYTEPS_SCHEDULING_CREDIT": "0"}, "credit_bytes", Settings().credit_bytes),
        ({"BYTEPS_SERVER_ENGINE_THREAD": "6"}, "engine_threads", 6),
        ({"BYTEPS_KEY_HASH_FN": "djb2"}, "placement", "hash:djb2"),
        ({"BYTEPS_PCIE_SWITCH_SIZE": "4"}, "pcie_switch_size", 4),
        ({"BYTEPS_REDUCE_ROOTS": "2,3"}, "reduce_roots", "2,3"),
        ({"BYTEPS_REDUCE_ROOTS": "2,3", "BPSFAST_REDUCE_ROOTS": "1"}, "reduce_roots", "1"),
        ({"DMLC_ENABLE_RDMA": "1"}, "transport", "rdma"),
        ({"DMLC_ENABLE_RDMA": "ibverbs"}, "transport", "rdma"),
        ({"DMLC_ENABLE_RDMA": "0"}, "transport", "auto"),
        ({"BYTEPS_ENABLE_IPC": "0"}, "allow_shm", False),
        ({"BYTEPS_ENABLE_IPC": "1"}, "allow_shm", True),
        ({"BYTEPS_TRACE_ON": "1"}, "trace_dir", "./trace"),
        ({"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": "/tmp/t"}, "trace_dir", "/tmp/t"),
        ({"BYTEPS_TRACE_ON": "0", "BYTEPS_TRACE_DIR": "/tmp/t"}, "trace_dir", ""),
        ({"BYTEPS_TRACE_ON": "1"}, "trace_first_step", 10),
        ({"BYTEPS_TRACE_ON": "1"}, "trace_last_step", 20),
        ({"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_START_STEP": "3"}, "trace_first_step", 3),
        ({"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_END_STEP": "30"}, "trace_last_step", 30),
        ({"BYTEPS_TRACE_ON": "1", "BPSFAST_TRACE_LAST_STEP": "0"}, "trace_last_step", 0),
        ({"BYTEPS_TRACE_ON": "0", "BYTEPS_TRACE_START_STEP": "3"}, "trace_first_step", 1),
        ({"BYTEPS_LOG_LEVEL": "trace"}, "log_level", "DEBUG"),
        ({"BYTEPS_LOG_LEVEL": "nonsense"}, "log_level", "WARNING"),
        ({"PS_VERBOSE": "1"}, "log_level", "INFO"),
        ({"PS_VERBOSE": "2", "BYTEPS_LOG_LEVEL": "ERROR"}, "log_level", "ERROR"),
        ({"PS_HEARTBEAT_INTERVAL": "2"}, "heartbeat_s", 2.0),
        ({"PS_HEARTBEAT_INTERVAL": "0"}, "heartbeat_s", 1.0),
        ({"PS_HEARTBEAT_TIMEOUT": "30"}, "lease_s", 30.0),
        ({"BYTEPS_ENABLE_MIXED_MODE": "1"}, "placement", "optimal"),
    ],
)
def test_a_variable_means(environ, name, value):
    assert getattr(load_with_origins({}, environ)[0], name) == value


def test_half_an_address_is_an_error_that_names_both_variables():
    with pytest.raises(ConfigError, match=r"DMLC_PS_ROOT_URI.*DMLC_PS_ROOT_PORT"):
        load_with_origins({}, {"DMLC_PS_ROOT_URI": "10.0.0.1"})


@pytest.mark.parametrize(
    "variable", ["BYTEPS_SCHEDULING_CREDIT", "PS_VERBOSE", "DMLC_NUM_WORKER", "BYTEPS_KEY_HASH_FN",
                 "BYTEPS_PCIE_SWITCH_SIZE", "BYTEPS_REDUCE_ROOTS"]
)
def test_a_bad_value_is_an_error_that_names_the_variable_or_the_value(variable):
    with pytest.raises(ConfigError, match=f"{variable}|xyz"):
        load_with_origins({}, {variable: "xyz"})


@pytest.mark.parametrize("size", ["0", "-4"])
def test_a_switch_without_gpus_is_an_error_that_names_the_variable(size):
    with pytest.raises(ConfigError, match=f"BYTEPS_PCIE_SWITCH_SIZE = '{size}'"):
        load_with_origins({}, {"BYTEPS_PCIE_SWITCH_SIZE": size})


def test_the_log_names_the_new_variables_once(caplog, monkeypatch):
    monkeypatch.setattr(byteps_variables, "_told", set())
    environ = {
        "BYTEPS_PARTITION_BYTES": "8192",
        "BYTEPS_ENABLE_MIXED_MODE": "1",
        "DMLC_ENABLE_UCX": "1",
        "BPSFAST_LOG_LEVEL": "INFO",
    }
    load({}, environ)
    load({}, environ)
    (read,) = (record for record in caplog.records if "BPSFAST_PARTITION_BYTES" in record.getMessage())
    assert read.levelno == logging.WARNING and "BYTEPS_PARTITION_BYTES" in read.getMessage()
    (not_obeyed,) = (record for record in caplog.records if "UCX" in record.getMessage())
    assert not_obeyed.levelno == logging.WARNING
    (without_effect,) = (record for record in caplog.records if "BYTEPS_ENABLE_MIXED_MODE" in record.getMessage())
    assert without_effect.levelno == logging.INFO


@pytest.mark.parametrize(("variable", "text", "name", "value"), [
    ("BYTEPS_NUMA_ON", "0", "numa", False), ("BYTEPS_NUMA_ON", "1", "numa", True),
    ("BYTEPS_VISIBLE_CPU_CORES", "1,4-5:20-25", "rank_cpus", "1,4-5:20-25"),
    ("BYTEPS_NUMA_DEFAULT_QUOTA", "3", "rank_cores", 3), ("BYTEPS_NUMA_ROOT_QUOTA", "5", "node_cores", 5),
    ("BYTEPS_CPU_BLACKLIST", "-1", "avoid_cpus", ""), ("BYTEPS_CPU_BLACKLIST", "3,7", "avoid_cpus", "3,7"),
    ("BYTEPS_MULTITHREADED_CPU", "0", "whole_cores", False),
])
def test_variables_of_cores(variable, text, name, value):
    assert getattr(load_with_origins({}, {variable: text})[0], name) == value


def test_steps_of_a_trace_that_contradict_are_an_error_that_names_them():
    with pytest.raises(ConfigError, match=r"30 \(BYTEPS_TRACE_START_STEP.*20 \(BYTEPS_TRACE_ON"):
        load_with_origins({}, {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_START_STEP": "30"})


def test_no_variable_has_two_meanings():
    groups = [
        set(byteps_variables.ALIASES),
        byteps_variables.ROLE_VARIABLES,
        set(byteps_variables.NOT_OBEYED),
        set(byteps_variables.NO_EFFECT),
    ]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert {alias.setting for alias in byteps_variables.ALIASES.values()} <= set(Settings.__struct_fields__)
