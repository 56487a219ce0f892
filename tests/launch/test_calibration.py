"""Tests the two-way rate measurement over a socket pair: it counts what arrives in the middle of the time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading

from bpsfast.launch.namespaces import calibration


def test_both_directions_are_counted():
    one, other = socket.socketpair()
    results = {}
    with one, other:
        peer = threading.Thread(target=lambda: results.update(other=calibration.exchange(other, 2.0)))
        peer.start()
        results["one"] = calibration.exchange(one, 2.0)
        peer.join(timeout=30)
    for result in results.values():
        assert result["received"] > 0
        assert 0.0 < result["seconds"] <= 2.0


def both_ends(seconds):
    """Run the program at both ends; return what each has measured."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-I", "-S", calibration.__file__]
    with subprocess.Popen([*command, "listen", str(port), seconds], stdout=subprocess.PIPE) as listen:
        done = subprocess.run(
            [*command, "connect", "127.0.0.1", str(port), seconds], capture_output=True, timeout=60, check=True
        )
        out, _ = listen.communicate(timeout=60)
    return json.loads(out), json.loads(done.stdout)


def test_the_program_runs_by_path_without_the_package():
    for seconds in ("0.4", "4", "20"):  # on a crowded machine one end may sleep through a short time
        results = both_ends(seconds)
        if all(result["received"] > 0 for result in results):
            break
    assert all(result["received"] > 0 and 0 < result["seconds"] <= float(seconds) for result in results), results
