"""A node that sees the machine recorded in a folder; given system calls fail.

    recorded_node.py FOLDER [CALL...]
"""
from __future__ import annotations

import os
import sys

import msgspec

# like pytest's pythonpath, which the daemons' environment does not have
sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from bpsfast.base import settings
from bpsfast.base.job_key import job_key
from bpsfast.hardware import host
from bpsfast.node import main
from tests.support.refused_calls import refuse

if __name__ == "__main__":
    loaded = settings.load()
    refuse(*sys.argv[2:])
    sys.exit(main.main(msgspec.structs.replace(loaded, job_key=job_key(loaded, loaded.scheduler).hex()),
                          host.open_host(sys.argv[1])))
