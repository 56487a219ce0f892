"""The seals of a connection: a key for each direction, others for each connection; what cannot be is said."""
from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from bpsfast.base import encryption
from bpsfast.base.addresses import default_route_host
from bpsfast.base.encryption import seals_of
from bpsfast.base.settings import Settings
from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.security import direction_key

SECRET = bytes(range(32))


def test_what_one_side_closes_the_other_opens():
    dialler, acceptor = seals_of(SECRET, dialled=True), seals_of(SECRET, dialled=False)
    for number in range(3):
        text = b"text %d" % number
        assert acceptor.incoming.open(dialler.out.close(text)) == text
        assert dialler.incoming.open(acceptor.out.close(text)) == text


@pytest.mark.parametrize("dialled", [True, False])
def test_nobody_opens_what_he_has_closed_himself(dialled):
    own = seals_of(SECRET, dialled=dialled)
    with pytest.raises(ValueError, match="has not sealed"):
        own.incoming.open(own.out.close(b"reflected"))


def test_another_connection_opens_nothing():
    record = seals_of(SECRET, dialled=True).out.close(b"text")
    with pytest.raises(ValueError, match="has not sealed"):
        seals_of(SECRET[::-1], dialled=False).incoming.open(record)


def test_keys_follow_from_the_secret_and_the_sender_and_are_not_it():
    keys = {direction_key(secret, sender) for secret in (SECRET, SECRET[::-1]) for sender in ("dialler", "acceptor")}
    assert len(keys) == 4 and SECRET not in keys and {len(key) for key in keys} == {32}


def test_rdma_is_refused_in_words():
    with pytest.raises(ConfigError, match=r"contradicts transport='rdma'.*transport=tcp or auto"):
        encryption.check(Settings(encryption="on", transport="rdma"))
    for transport in ("auto", "tcp", "shm"):
        encryption.check(Settings(encryption="on", transport=transport))
    encryption.check(Settings(transport="rdma"))


@pytest.mark.parametrize(("values", "near", "far"), [
    ({}, False, True), ({"encryption": "on"}, True, True), ({"encryption": "off"}, False, False),
    ({"insecure": True}, False, False)])
def test_by_default_what_leaves_the_machine_is_encrypted(values, near, far):
    which = encryption.Encryption.of(Settings(**values))
    if not default_route_host():
        pytest.skip("this machine has no address besides the loopback")
    for family, host, expected in ((socket.AF_INET, "127.0.0.1", near), (socket.AF_INET6, "::1", near),
                                   (socket.AF_INET, default_route_host(), far)):
        with socket.socket(family) as listener:
            listener.bind((host, 0))
            listener.listen()
            with socket.create_connection(listener.getsockname()[:2]) as dialled, listener.accept()[0] as accepted:
                assert which.covers(dialled) == which.covers(accepted) == expected
    one, other = socket.socketpair()
    with one, other:
        assert not which.covers(one), "it does not leave the machine"


def test_a_machine_without_libcrypto_is_refused_in_words():
    program = """
from bpsfast.node import transport
from bpsfast.base.addresses import default_route_host
from bpsfast.orchestration.errors import ConfigError
from bpsfast.pyx import seal
from bpsfast.base.settings import Settings
seal._LIBRARIES = (b"libnobodyhas.so.7",)
here, there = "127.0.0.1:7700", "10.0.0.1:7700"
transport.check(Settings(scheduler=here))
transport.check(Settings(scheduler=there, encryption="off"))
transport.check(Settings(scheduler=there, insecure=True))
for settings in (Settings(scheduler=there), Settings(scheduler=there, num_nodes=1, num_helpers=1),
                 Settings(scheduler=here, encryption="on")):
    try:
        transport.check(settings)
    except ConfigError as exc:
        print(exc)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    for words in ("encrypted by OpenSSL's libcrypto", "libnobodyhas.so.7: not found", "apt-get install"):
        assert done.stdout.count(words) == 3, done.stdout + done.stderr
