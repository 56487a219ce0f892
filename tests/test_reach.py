"""Whether anybody answers: a listener, and nobody."""
from __future__ import annotations

import socket

import pytest

from bpsfast.launch.reach import nobody_at


@pytest.mark.usefixtures("no_leaks")
def test_who_listens_is_nothing_to_complain_about():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert nobody_at(*listener.getsockname()) == ""


@pytest.mark.usefixtures("no_leaks")
def test_nobody_is_named_with_the_address_and_what_to_check():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        port = bound.getsockname()[1]
        text = nobody_at("127.0.0.1", port)
    assert f"address 127.0.0.1:{port} (Connection refused)" in text and "BPSFAST_SCHEDULER" in text


def test_a_port_that_this_process_does_not_know_is_nobodys_fault():
    assert nobody_at("127.0.0.1", 0) == ""
