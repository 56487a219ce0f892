"""Our end of an `independent_peer`: a child process that is told what to do."""
from __future__ import annotations

import json
import select
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.guest.hosts import GID_INDEX
from tests.guest.verbs_end import NBYTES, End

PYTHON = "/usr/bin/python3"
_PROGRAM = Path(__file__).with_name("independent_peer.py")
_TIMEOUT_S = 90.0


def missing() -> str | None:
    """Say what is missing for an independent peer, None if nothing."""
    done = subprocess.run([PYTHON, "-I", "-c", "import pyverbs.device"], capture_output=True, text=True, timeout=60,
                          check=False)
    return f"no pyverbs for {PYTHON}: apt-get install python3-pyverbs" if done.returncode else None


class PeerProcess:
    """Starts the peer on *device*. Attributes as `End.connect` and `End.write` want them of a peer."""

    def __init__(self, device: str, nbytes: int = NBYTES) -> None:
        self.process = subprocess.Popen([PYTHON, "-I", str(_PROGRAM), device, str(GID_INDEX), str(nbytes)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        told = self._answer()
        self.number, self.psn = told["number"], told["psn"]
        self.gid = bytes.fromhex(told["gid"].replace(":", ""))
        self.region = SimpleNamespace(address=told["address"], rkey=told["rkey"], nbytes=nbytes)

    def call(self, verb: str, *arguments: Any) -> Any:
        """Have the peer do something; return its answer."""
        self.process.stdin.write(json.dumps([verb, arguments]) + "\n")
        return self._answer()

    def connect(self, end: End) -> None:
        """Connect both to each other."""
        gid = end.device.gid(1, GID_INDEX).hex()
        self.call("connect", end.pair.number, end.pair.psn, ":".join(gid[i:i + 4] for i in range(0, 32, 4)))
        end.connect(self)

    def _answer(self) -> Any:
        ready, _, _ = select.select([self.process.stdout], [], [], _TIMEOUT_S)
        assert ready, f"the peer said nothing for {_TIMEOUT_S:g} s"
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait(10)}"
        return json.loads(line)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)
