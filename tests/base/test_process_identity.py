"""Tests identifiers of machines and network namespaces."""
from __future__ import annotations

import os
import subprocess
import sys

from bpsfast.base import process_identity

ASK = "from bpsfast.base import process_identity as p; print(p.boot_id(), p.network_id(), sep='\\n')"


def test_processes_of_a_machine_agree():
    found = subprocess.run([sys.executable, "-c", ASK], check=True, capture_output=True, text=True, timeout=60).stdout
    assert found.splitlines() == [process_identity.boot_id(), process_identity.network_id()]
    boot, network = process_identity.boot_id(), process_identity.network_id()
    assert network.startswith(boot) and network != boot


def test_where_the_kernel_does_not_tell_it_is_the_machines_name(monkeypatch, tmp_path):
    monkeypatch.setattr(process_identity, "_BOOT_ID", tmp_path / "none")
    assert process_identity.boot_id() == os.uname().nodename
