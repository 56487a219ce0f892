"""Run a command, or test suites, in a guest with RDMA devices; see the package's docstring for what it finds there."""
from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from typing import BinaryIO

from tests.guest import kernel
from tests.guest.machine import GuestDiedError, Job, Machine

TIMED_OUT, NO_GUEST = 124, 125


def main(arguments: list[str]) -> int:
    """Return the command's exit status, 124 if its time was up, 125 if there was no guest, or no longer."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if options.verb == "setup":
            print(*kernel.prepare(options.refresh), sep="\n")
            return 0
        command = list(options.command)
        if options.verb == "pytest":
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *command]
        return _run(command, options)
    except (kernel.MissingError, GuestDiedError) as exc:
        print(f"guest: {exc}", file=sys.stderr)
        return NO_GUEST


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.guest", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    setup = verbs.add_parser("setup", help="fetch the kernel and pack what boots it, later runs need no network")
    setup.add_argument("--refresh", action="store_true", help="fetch the newest kernel again")
    run = verbs.add_parser("run", help="boot, run COMMAND in this folder, end with its exit status")
    run.add_argument("--out", metavar="DIR", help="where to put what COMMAND writes below $OUT")
    test = verbs.add_parser("pytest", help="boot, run this interpreter's pytest with the arguments")
    for verb in (run, test):
        verb.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for COMMAND (600)")
        verb.add_argument("--hosts", type=int, default=2, metavar="N", help="hosts, each with a device (2)")
        verb.add_argument("--processors", type=int, default=2, metavar="N", help="the guest's processors (2)")
        verb.add_argument("--memory", type=int, default=4096, metavar="MB", help="the guest's memory (4096)")
        verb.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for COMMAND")
        verb.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    return parser


def _run(command: list[str], options: argparse.Namespace) -> int:
    if command[:1] == ["--"]:
        del command[0]
    environ = dict(pair.partition("=")[::2] for pair in options.env)
    with Machine(options.hosts, options.processors, options.memory) as guest:
        job = guest.start(command, environ=environ)
        try:
            ended = _follow(job, options.timeout)
        finally:
            if getattr(options, "out", None):
                shutil.copytree(job.out, options.out, dirs_exist_ok=True)
    if not ended:
        print(f"guest: killed after {options.timeout:g} s", file=sys.stderr)
    return job.status if ended and job.status is not None else TIMED_OUT


def _follow(job: Job, timeout_s: float) -> bool:
    """Copy the job's output as it comes; kill it when its time is up. Say whether it ended by itself."""
    deadline = time.monotonic() + timeout_s
    seen = {"stdout": 0, "stderr": 0}
    sinks: dict[str, BinaryIO] = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    while True:
        ended = job.wait(min(0.1, max(0.0, deadline - time.monotonic())))
        late = not ended and time.monotonic() >= deadline
        if late:
            job.kill()
        for name, sink in sinks.items():
            path = job.folder / name
            if path.exists():
                with path.open("rb") as file:
                    file.seek(seen[name])
                    seen[name] += sink.write(file.read())
                sink.flush()
        if ended or late:
            return ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
