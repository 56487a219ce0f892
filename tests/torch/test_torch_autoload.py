"""The backend's name is known after `import torch` if the environment asks for it, and nothing else has changed."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

_loads_by_itself = pytest.mark.skipif(
    tuple(map(int, version("torch").split(".")[:2])) < (2, 5), reason="torch before 2.5 loads no backends by itself")
#: What `import bpsfast` loads: names and functions, none of which imports anything before it is called.
LIGHT = {"bpsfast", "bpsfast._renamed", "bpsfast._version", "bpsfast.base", "bpsfast.base.hooks",
         "bpsfast.torch_autoload"}
PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
loaded = sorted(name for name in sys.modules if name.partition(".")[0] in ("bpsfast", "numba", "zmq", "msgspec"))
known = "bpsfast" in dist.Backend.backend_list
plugged = "BPSFAST" in dist.Backend._plugins
default = dist.Backend.default_device_backend_map["cpu"]
handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
before = dict(handlers)
if known:
    from bpsfast import torch_autoload
    torch_autoload.register()
print(json.dumps([known, plugged, default, loaded, handlers == before]))
"""

GROUP = """
import os, torch
import torch.distributed as dist
dist.init_process_group("bpsfast", rank=0, world_size=1, store=dist.HashStore())
x = torch.arange(3.0)
dist.all_reduce(x)
print(x.tolist(), dist.get_backend(), type(dist.group.WORLD).__module__)
dist.destroy_process_group()
"""


def run(program, tmp_path, asked):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("BPSFAST_", "DMLC_"))}
    if asked is not None:
        environ["BPSFAST_TORCH_AUTOLOAD"] = asked
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@_loads_by_itself
@pytest.mark.parametrize("asked", ["1", "true", " ON "])
def test_the_name_is_known_where_it_is_asked_for(tmp_path, asked):
    known, plugged, default, loaded, alike = json.loads(run(PROGRAM, tmp_path, asked))
    assert known and plugged and default == "gloo", "gloo stays what CPU tensors are reduced by"
    assert set(loaded) <= LIGHT, "nothing of bpsfast that does anything before a group is made"
    assert alike, "saying it again changes nothing"


@pytest.mark.parametrize("asked", [None, "", "0", "no"])
def test_the_name_is_unknown_where_it_is_not(tmp_path, asked):
    known, plugged, default, loaded, _ = json.loads(run(PROGRAM, tmp_path, asked))
    assert not known and not plugged and default == "gloo"
    assert set(loaded) <= LIGHT


@_loads_by_itself
def test_a_group_is_made_by_its_name_without_any_import(tmp_path):
    line = run(GROUP, tmp_path, "1")
    assert line == "[0.0, 1.0, 2.0] bpsfast bpsfast.torch.backend.process_group"
