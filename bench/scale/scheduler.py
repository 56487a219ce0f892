"""The scheduler of `bench scale`, in a process of its own:  python -m bpsfast.bench.scale.scheduler JSON

JSON has the fields of `JobSettings`, `port` and `key` (hex). It prints "listening" once nodes can connect.
"""
from __future__ import annotations

import json
import sys

from bpsfast.orchestration.failover.scheduler import Scheduler
from bpsfast.orchestration.job.admission import JobSettings


def main() -> int:
    """Be the scheduler until the job ends; return the exit code."""
    fields = json.loads(sys.argv[1])
    port, key = fields.pop("port"), bytes.fromhex(fields.pop("key"))
    scheduler = Scheduler(JobSettings(**fields), key, bind_host="127.0.0.1", port=port)
    print("listening", flush=True)
    return scheduler.run()


if __name__ == "__main__":
    raise SystemExit(main())
