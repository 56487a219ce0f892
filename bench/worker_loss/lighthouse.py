"""torchft's lighthouse, in a process of its own because it logs each step.

    python -m bpsfast.bench.worker_loss.lighthouse FILE JSON

It writes its address to FILE, and ends when its standard input does. JSON: options of torchft's LighthouseServer.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Serve until the end of the input."""
    from torchft.coordination import LighthouseServer

    path = Path(arguments[0])
    server = LighthouseServer(bind="127.0.0.1:0", **json.loads(arguments[1]))
    new = path.with_suffix(".new")
    new.write_text(f"http://127.0.0.1:{server.address().rpartition(':')[2]}")
    new.replace(path)
    sys.stdin.read()
    server.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
