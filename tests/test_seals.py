"""The seals of a connection: a key for each direction, others for each connection; what cannot be is said."""
from __future__ import annotations

import subprocess
import sys

import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.security import direction_key
from bpsfast.transport import seals
from bpsfast.transport.seals import seals_of

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
        seals.check("rdma")
    for transport in ("auto", "tcp", "shm"):
        seals.check(transport)


def test_a_machine_without_libcrypto_is_refused_in_words():
    program = """
from bpsfast import transport
from bpsfast.orchestration.errors import ConfigError
from bpsfast.pyx import seal
from bpsfast.settings import Settings
seal._LIBRARIES = (b"libnobodyhas.so.7",)
transport.check(Settings())
try:
    transport.check(Settings(encryption="on"))
except ConfigError as exc:
    print(exc)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    for words in ("encryption='on' needs OpenSSL's libcrypto", "libnobodyhas.so.7: not found", "apt-get install"):
        assert words in done.stdout, done.stdout + done.stderr
