"""A list of addresses of the scheduler means the same job in every process, and each scheduler knows its own one."""
from __future__ import annotations

import socket

import pytest

from bpsfast.base.addresses import local_host, no_scheduler_hint
from bpsfast.base.job_key import default_node_id, job_key
from bpsfast.base.settings import (
    Settings,
    environment,
    first_address,
    format_addresses,
    load_with_origins,
    parse_addresses,
)
from bpsfast.launch.daemons import own_address
from bpsfast.launch.roles import detect
from bpsfast.orchestration.errors import ConfigError

KEY = "ab" * 32
LIST = "10.0.0.1:77,[fd00::2]:78,third.example:79"


def loaded(**values):
    return load_with_origins(values, {})[0]


def test_a_list_has_addresses_of_all_kinds():
    found = parse_addresses(LIST)
    assert found == [("10.0.0.1", 77), ("fd00::2", 78), ("third.example", 79)]
    assert format_addresses(found) == LIST and first_address(LIST) == "10.0.0.1:77"
    assert parse_addresses(" 10.0.0.1:77 , b:1") == [("10.0.0.1", 77), ("b", 1)]


@pytest.mark.parametrize(("text", "words"), [
    ("10.0.0.1:77,", "gives '' as an address"), ("10.0.0.1:77,,b:1", "gives '' as an address"),
    ("a:1,b", "gives 'b' as an address"), ("a:1,fd00::1:7", "an IPv6 address in brackets"),
    ("a:1,b:2,a:1", "has the address a:1 twice"), ("a:1;b:2", "gives 'a:1;b:2' as an address")])
def test_what_is_no_list_is_refused_before_anything_starts(text, words):
    with pytest.raises(ConfigError, match="BPSFAST_SCHEDULER") as raised:
        loaded(scheduler=text)
    assert words in str(raised.value)


def test_an_index_that_the_list_does_not_have_is_refused():
    assert loaded(scheduler=LIST, scheduler_index=2).scheduler_index == 2
    with pytest.raises(ConfigError, match=r"BPSFAST_SCHEDULER_INDEX = 3 .* has 3 addresses, counted from 0"):
        loaded(scheduler=LIST, scheduler_index=3)


def test_addresses_of_the_loopback_and_others_are_no_list():
    with pytest.raises(ConfigError, match="has addresses of the loopback and others"):
        job_key(Settings(job_key=KEY), "127.0.0.1:7,10.0.0.1:8")


def test_the_first_address_stands_for_the_job(monkeypatch):
    """A process that knows only the beginning of the list, or another rest, belongs to the same job."""
    insecure = Settings(insecure=True)
    assert job_key(insecure, LIST) == job_key(insecure, "10.0.0.1:77") != job_key(insecure, "10.0.0.2:77")
    assert default_node_id(insecure, LIST) == default_node_id(insecure, "10.0.0.1:77")
    local = "127.0.0.1:7,127.0.0.2:8"
    assert job_key(Settings(), local) == job_key(Settings(), "127.0.0.1:7")
    with pytest.raises(ConfigError, match="there is no job key"):
        job_key(Settings(), LIST)


ENVIRONMENTS = {
    "bpsfast": {"BPSFAST_RANK": "1", "BPSFAST_SIZE": "2", "BPSFAST_LOCAL_RANK": "0", "BPSFAST_LOCAL_SIZE": "1"},
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1",
                 "GROUP_WORLD_SIZE": "2"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                 "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    "dmlc": {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "0", "DMLC_WORKER_ID": "1",
             "BYTEPS_LOCAL_RANK": "0", "BYTEPS_LOCAL_SIZE": "1"},
}


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_every_launcher_s_ranks_hand_the_list_on(launcher):
    environ = ENVIRONMENTS[launcher] | {"BPSFAST_SCHEDULER": LIST, "BPSFAST_JOB_KEY": KEY}
    settings = load_with_origins({}, environ)[0]
    role = detect(settings, environ)
    assert (role.launcher, role.scheduler) == (launcher, ("10.0.0.1", 77))
    assert role.schedulers == parse_addresses(LIST)
    filled = role.settings(settings)
    assert filled.scheduler == LIST and environment(filled)["BPSFAST_SCHEDULER"] == LIST


def test_a_scheduler_listens_on_the_address_of_its_machine():
    assert own_address(loaded(scheduler="198.51.100.1:7")) == 0, "the only one, wherever it leads"
    assert own_address(loaded(scheduler="198.51.100.1:7,127.0.0.1:8,127.0.0.2:9")) == 1
    assert own_address(loaded(scheduler="198.51.100.1:7,127.0.0.1:8,127.0.0.2:9", scheduler_index=2)) == 2
    assert own_address(loaded(scheduler=f"198.51.100.1:7,{socket.gethostname()}:8")) == 1
    with pytest.raises(ConfigError, match=r"none of the addresses in BPSFAST_SCHEDULER = .* is one of this machine"):
        own_address(loaded(scheduler="198.51.100.1:7,198.51.100.2:8"))


def test_a_machine_finds_its_address_though_the_first_scheduler_s_name_is_gone():
    settings = loaded(start_timeout_s=0.4)
    assert local_host(settings, ["gone.invalid", "127.0.0.1"]) == "127.0.0.1"


def test_nobody_is_missed_if_one_of_several_schedulers_can_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = closed.getsockname()[:2]
        assert no_scheduler_hint([nobody, listener.getsockname()[:2]]) == ""
        assert f"127.0.0.1:{nobody[1]}" in no_scheduler_hint([nobody, nobody])
