"""A rank of a test's job, which attaches and then runs the functions that the test sends.

It is a program of its own (see `conftest.Job`), so that it imports the same modules as a trainer, and pytest only if
the test module does. Ranks that use torch are forked (see `forked`).
"""
from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection

# like pytest's pythonpath, because test files import their helpers
sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def load(path: str) -> object:
    """Return the test module at *path*, imported once under its own name."""
    name = os.path.splitext(os.path.basename(path))[0]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def serve(commands: Connection) -> None:
    """Run the functions from *commands* until it or the job ends."""
    while True:
        try:
            path, name, arguments = pickle.loads(commands.recv_bytes())
        except EOFError:
            return
        try:
            if path is None:
                import bpsfast

                result = getattr(bpsfast, name)(*arguments)
            else:
                result = getattr(load(path), name)(*arguments)
            answer = ("value", result)
        except Exception as exc:
            answer = ("error", type(exc).__name__, str(exc), traceback.format_exc())
        commands.send_bytes(pickle.dumps(answer))
        if path is None and name == "shutdown":
            return


if __name__ == "__main__":
    serve(Connection(int(os.environ.pop("BPSTEST_FD"))))
