"""Tests settings: one table, five origins in order, errors that name the variable."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bpsfast.base import settings
from bpsfast.base.settings import Settings, environment, fingerprint, load_with_origins, parse_address, table
from bpsfast.orchestration.errors import ConfigError


def read(environ=None, **overrides):
    return load_with_origins(overrides, environ or {})[0]


def test_defaults_are_those_of_the_class():
    loaded, origins = load_with_origins({}, {})
    assert loaded == Settings()
    assert set(origins.values()) == {"default"}


def test_every_origin_wins_over_the_next(tmp_path):
    profile = tmp_path / "job.toml"
    profile.write_text("partition_bytes = 5000\ncredit_bytes = 60000\n")
    layers = [
        ({"BPSFAST_PROFILE": str(profile)}, {}, 5000, f"profile {profile}"),
        (
            {"BPSFAST_PROFILE": str(profile), "BYTEPS_PARTITION_BYTES": "6000"},
            {},
            6000,
            "BYTEPS_PARTITION_BYTES (alias)",
        ),
        ({"BYTEPS_PARTITION_BYTES": "6000", "BPSFAST_PARTITION_BYTES": "7000"}, {}, 7000, "BPSFAST_PARTITION_BYTES"),
        ({"BPSFAST_PARTITION_BYTES": "7000"}, {"partition_bytes": 8000}, 8000, "command line"),
    ]
    for environ, overrides, value, origin in layers:
        loaded, origins = load_with_origins(overrides, environ)
        assert (loaded.partition_bytes, origins["partition_bytes"]) == (value, origin)


def test_all_nodes_agree_whether_they_encrypt():
    assert fingerprint(Settings())["encryption"] == "auto" != fingerprint(read(encryption="on"))["encryption"]
    assert fingerprint(Settings())["insecure"] != fingerprint(read(insecure=True))["insecure"]
    with pytest.raises(ConfigError, match=r"BPSFAST_ENCRYPTION = on .*contradicts BPSFAST_INSECURE = 1"):
        read(encryption="on", insecure=True)
    with pytest.raises(ConfigError, match="BPSFAST_ENCRYPTION"):
        read({"BPSFAST_ENCRYPTION": "maybe"})


def test_an_unknown_variable_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"BPSFAST_PARTITON_BYTES.*did you mean BPSFAST_PARTITION_BYTES\?"):
        read({"BPSFAST_PARTITON_BYTES": "1"})
    with pytest.raises(ConfigError, match="bpsfast env"):
        read({"BPSFAST_QQQQ": "1"})


def test_an_unknown_name_on_the_command_line_or_in_a_profile_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"command line sets transprt.*did you mean transport"):
        read(transprt="tcp")
    profile = tmp_path / "job.toml"
    profile.write_text("tcp_stream = 2")
    with pytest.raises(ConfigError, match="did you mean tcp_streams"):
        read(profile=str(profile))


@pytest.mark.parametrize(
    "name, value",
    [
        ("partition_bytes", "many"),
        ("partition_bytes", "1"),
        ("tcp_streams", "5"),
        ("rdma_queue_pairs", "0"),
        ("transport", "udp"),
        ("timeout_s", "0"),
        ("allow_shm", "perhaps"),
        ("placement", "hash:md5"),
        ("log_level", "LOUD"),
        ("scheduler", "no-port"),
        ("rank_cpus", "0-3:4-"),
        ("rank_cpus", "0-3::4-7"),
        ("rank_cpus", "3-0"),
        ("rank_cores", "-1"),
        ("avoid_cpus", "-1"),
        ("avoid_cpus", "1:2"),
        ("avoid_cpus", "99999"),
        ("pcie_switch_size", "-1"),
        ("reduce_roots", "2,x"),
        ("reduce_roots", "2-3"),
    ],
)
def test_a_bad_value_is_an_error_that_names_variable_and_value(name, value):
    with pytest.raises(ConfigError) as caught:
        read({"BPSFAST_" + name.upper(): value})
    assert value in str(caught.value)


@pytest.mark.parametrize(
    "text, nbytes",
    [("8192", 8192), ("4K", 4096), ("4MB", 4 << 20), ("4 MiB", 4 << 20), ("4m", 4 << 20), ("1GiB", 1 << 30)],
)
def test_bytes_may_have_a_unit(text, nbytes):
    assert read({"BPSFAST_PARTITION_BYTES": text}).partition_bytes == nbytes
    assert read({"BYTEPS_PARTITION_BYTES": text}).partition_bytes == nbytes
    assert read(credit_bytes=text).credit_bytes == nbytes


@pytest.mark.parametrize("name, text", [("PARTITION_BYTES", "4T"), ("PARTITION_BYTES", "M"), ("RANK", "4K")])
def test_other_units_are_errors(name, text):
    with pytest.raises(ConfigError, match=text):
        read({"BPSFAST_" + name: text})


def test_the_job_key_is_never_shown():
    with pytest.raises(ConfigError) as caught:
        load_with_origins({"job_key": 17}, {})
    assert "17" not in str(caught.value)


def test_values_that_contradict_are_an_error_that_names_both():
    with pytest.raises(ConfigError, match=r"BPSFAST_LEASE_S.*BPSFAST_HEARTBEAT_S"):
        read(lease_s=1, heartbeat_s=1)
    with pytest.raises(ConfigError, match=r"BPSFAST_HELPER_LEASE_S = 0\.1 .* at least 0\.5, or 0 "):
        read(helper_lease_s=0.1)
    assert read(helper_lease_s=0).helper_lease_s == 0
    with pytest.raises(ConfigError, match=r"BPSFAST_TRACE_FIRST_STEP = 5.*BPSFAST_TRACE_LAST_STEP = 4"):
        read(trace_first_step=5, trace_last_step=4)
    with pytest.raises(ConfigError, match=r"BPSFAST_TRANSPORT.*BPSFAST_ALLOW_SHM"):
        read(transport="shm", allow_shm="0")


def test_an_empty_variable_counts_as_not_set():
    assert read({"BPSFAST_TRANSPORT": "", "DMLC_INTERFACE": ""}) == Settings()


@pytest.mark.parametrize("content, text", [("x = [", "not TOML"), (None, "cannot be read")])
def test_an_unreadable_profile_is_an_error(tmp_path, content, text):
    profile = tmp_path / "job.toml"
    if content is not None:
        profile.write_text(content)
    with pytest.raises(ConfigError, match=text):
        read({"BPSFAST_PROFILE": str(profile)})


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "transport": st.sampled_from(["auto", "tcp", "rdma"]),
            "allow_shm": st.booleans(),
            "partition_bytes": st.integers(4096, 1 << 40),
            "timeout_s": st.floats(1e-3, 1e6),
            "node_id": st.text("abc-1", min_size=1),
            "job_key": st.binary(max_size=40).map(bytes.hex),
            "rank": st.integers(-1, 9999),
        },
    )
)
def test_a_child_loads_the_same_settings_from_the_environment(values):
    loaded = read(**values)
    assert load_with_origins({}, environment(loaded))[0] == loaded


def test_the_fingerprint_holds_what_must_agree_and_nothing_private():
    names = set(fingerprint(Settings()))
    assert {"transport", "placement", "partition_bytes", "fusion_bytes", "lease_s"} <= names
    assert not names & {"job_key", "rank", "node_host", "engine_threads"}
    assert fingerprint(Settings()) != fingerprint(Settings(partition_bytes=8192))


def test_the_table_has_a_meaning_for_every_field():
    rows = table()
    assert [row.name for row in rows] == list(Settings.__struct_fields__)
    assert all(row.doc and row.kind and row.variable == "BPSFAST_" + row.name.upper() for row in rows)


@pytest.mark.parametrize(
    "text, address", [("h:1", ("h", 1)), ("[::1]:70", ("::1", 70)), ("127.0.0.1:0", ("127.0.0.1", 0))]
)
def test_an_address_is_host_and_port(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", ":1", "h:", "h:x", "h:65536", "h:-1"])
def test_what_is_no_address_is_an_error(text):
    with pytest.raises(ConfigError, match="expected host:port"):
        parse_address(text)


def test_load_reads_the_real_environment(monkeypatch):
    monkeypatch.setenv("BPSFAST_NODE_ID", "here")
    assert settings.load().node_id == "here"


@pytest.mark.parametrize("values", [
    *({"ports": ports} for ports in ("1", "-", "0-5", "9-5", "a-b", "1-65536", "5-")),
    {"advertise": "10.0.0.1:3000"}, {"advertise": "gateway"}])
def test_ports_and_addresses_are_checked_before_anything_starts(values):
    with pytest.raises(ConfigError, match=r"is no range of ports|is no IP address"):
        settings.load(values, {})


@pytest.mark.parametrize("text", ["fd00::1", "::1", "fd00::1:7700", "[fd00::1]", "host", ":1", "host:70000"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="an IPv6 address in brackets"):
        parse_address(text)


def test_addresses_of_both_versions_are_read():
    assert parse_address("[fd00::1]:77") == ("fd00::1", 77) and parse_address("host:77") == ("host", 77)
