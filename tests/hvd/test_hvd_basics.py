"""bpsfast.hvd: names and signatures are Horovod's; init, shutdown, ranks, the timeline, use under a launcher."""
from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import bpsfast
import bpsfast.hvd as hvd
from bpsfast.hvd import runtime
from tests.support.hvd_ranks import begun

SIGNATURES = {
    "init": "comm=None, process_sets=None",
    "shutdown": "", "is_initialized": "", "rank": "", "size": "", "local_rank": "", "local_size": "",
    "cross_rank": "", "cross_size": "", "is_homogeneous": "", "mpi_threads_supported": "", "mpi_enabled": "",
    "mpi_built": "", "gloo_enabled": "", "gloo_built": "", "nccl_built": "", "ddl_built": "", "ccl_built": "",
    "cuda_built": "", "rocm_built": "", "start_timeline": "file_path, mark_cycles=False", "stop_timeline": "",
    "allreduce": "tensor, average=None, name=None, compression=none, op=None, prescale_factor=1.0, "
                 "postscale_factor=1.0, process_set=global",
    "allreduce_": "tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, "
                  "process_set=global",
    "grouped_allreduce": "tensors, average=None, name=None, compression=none, op=None, prescale_factor=1.0, "
                         "postscale_factor=1.0, process_set=global",
    "grouped_allreduce_": "tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, "
                          "process_set=global",
    "sparse_allreduce_async": "tensor, name, op, process_set=global",
    "allgather": "tensor, name=None, process_set=global",
    "grouped_allgather": "tensors, name=None, process_set=global",
    "broadcast": "tensor, root_rank, name=None, process_set=global",
    "alltoall": "tensor, splits=None, name=None, process_set=global",
    "reducescatter": "tensor, name=None, compression=none, op=Average, process_set=global, prescale_factor=1.0, "
                     "postscale_factor=1.0",
    "grouped_reducescatter": "tensors, name=None, compression=none, op=Average, process_set=global, "
                             "prescale_factor=1.0, postscale_factor=1.0",
    "reducescatter_async": "tensor, name=None, op=Average, process_set=global, prescale_factor=1.0, "
                           "postscale_factor=1.0",
    "grouped_reducescatter_async": "tensors, name=None, op=Average, process_set=global, prescale_factor=1.0, "
                                   "postscale_factor=1.0",
    "barrier": "process_set=global", "join": "device=-1", "poll": "handle", "synchronize": "handle",
    "broadcast_parameters": "params, root_rank", "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=global",
    "allgather_object": "obj, name=None, process_set=global",
    "add_process_set": "process_set", "remove_process_set": "process_set",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, "
                            "op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, "
                            "sparse_as_dense=False, process_set=global",
}
for _name, _other in (("allreduce_async", "allreduce_"), ("allreduce_async_", "allreduce_"),
                      ("grouped_allreduce_async", "grouped_allreduce_"),
                      ("grouped_allreduce_async_", "grouped_allreduce_"), ("allgather_async", "allgather"),
                      ("grouped_allgather_async", "grouped_allgather"), ("broadcast_async", "broadcast"),
                      ("broadcast_", "broadcast"), ("broadcast_async_", "broadcast"), ("alltoall_async", "alltoall")):
    SIGNATURES[_name] = SIGNATURES[_other]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_horovods(name):
    words = {hvd.Compression.none: "none", hvd.global_process_set: "global", hvd.Average: "Average"}
    shown = []
    for parameter in inspect.signature(getattr(hvd, name)).parameters.values():
        default = parameter.default
        known = next((word for each, word in words.items() if default is each), repr(default))
        shown.append(parameter.name + ("" if default is parameter.empty else f"={known}"))
    assert ", ".join(shown) == SIGNATURES[name]


def test_every_name_of_horovod_is_there():
    for name in [*SIGNATURES, "Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression", "ProcessSet",
                 "global_process_set", "HorovodInternalError", "SyncBatchNorm"]:
        assert name in hvd.__all__ and hasattr(hvd, name)
    assert (int(hvd.Average), int(hvd.Sum), int(hvd.Adasum), int(hvd.Min), int(hvd.Max), int(hvd.Product)) == (
        0, 1, 2, 3, 4, 5)


def test_the_module_of_pytorch_is_the_same():
    import bpsfast.hvd.torch as api

    assert hvd.__all__ is api.__all__ and all(getattr(hvd, name) is getattr(api, name) for name in api.__all__)


def test_no_framework_is_imported_before_it_is_used():
    program = ("import sys, bpsfast.hvd as hvd\nfrom bpsfast.hvd import errors\nassert 'torch' not in sys.modules\n"
               "from bpsfast.hvd import *\nassert 'torch' in sys.modules and allreduce is hvd.allreduce")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_is_not_there_says_so():
    assert not hasattr(hvd, "nothing_of_the_kind")
    for kind in (ValueError, NotImplementedError, TypeError):
        with pytest.raises(kind, match="op=Adasum is not there"):
            hvd.allreduce_async(torch.ones(1), op=hvd.Adasum)


@pytest.mark.parametrize("function", [hvd.poll, hvd.synchronize])
def test_what_is_no_handle_is_a_value_error(function):
    with pytest.raises(ValueError, match="12345 is a int, no handle of an operation"):
        function(12345)


def test_before_init_everything_says_so():
    for function in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.is_homogeneous, hvd.stop_timeline,
                     lambda: hvd.allreduce(torch.ones(1)), hvd.join, hvd.barrier,
                     lambda: hvd.start_timeline("never written")):
        with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)."):
            function()
    assert not hvd.is_initialized()
    assert not any((hvd.mpi_built(), hvd.mpi_enabled(), hvd.gloo_built(), hvd.gloo_enabled(), hvd.nccl_built(),
                    hvd.ddl_built(), hvd.ccl_built(), hvd.cuda_built(), hvd.rocm_built()))
    with pytest.raises(ValueError, match="Horovod MPI is not enabled"):
        hvd.mpi_threads_supported()
    with pytest.raises(ValueError, match="Horovod has not been built with MPI support"):
        hvd.init(comm=object())


def places():
    hvd.init()
    hvd.init()  # changes nothing
    return (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(),
            hvd.is_homogeneous(), hvd.is_initialized())


def test_places(job):
    assert job(ranks=(2, 1), helpers=1, transport="tcp").run(places) == [
        (0, 3, 0, 2, 0, 2, False, True), (1, 3, 1, 2, 0, 1, False, True), (2, 3, 0, 1, 1, 2, False, True)]
    assert [place[4:7] for place in job(ranks=(1, 1), transport="tcp").run(places)] == [(0, 2, True), (1, 2, True)]


def part_of_the_ranks():
    with pytest.raises(TypeError, match=r"comm=\[0\]: a part of the job's ranks 0 to 1"):
        hvd.init(comm=[0])
    hvd.init(comm=[1, 0])
    hvd.shutdown()
    return hvd.is_initialized(), threading.active_count()


def test_comm_is_all_ranks_or_nothing(job):
    (first, n_threads), *others = job(ranks=(2,)).run(part_of_the_ranks)
    assert not first and all(other == (False, n_threads) for other in others)


def begin_in_discord():
    """Let init fail, as the ranks disagree; return the threads that are left, and whether the next init works."""
    usual = runtime.Request
    if bpsfast.rank():
        runtime.Request = lambda **fields: usual(**{**fields, "kind": "add_process_set"})
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched operations"):
        hvd.init()
    left = [thread.name for thread in threading.enumerate() if thread.name == "bpsfast-hvd"]
    is_there = hvd.is_initialized()
    runtime.Request = usual
    hvd.init()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    hvd.shutdown()
    return left, is_there, total


def test_a_beginning_that_fails_leaves_nothing_in_a_session_that_goes_on(job):
    own = job(ranks=(2,))
    assert own.run(begin_in_discord) == [([], False, 2.0)] * 2


def trace(path):
    hvd.init()
    hvd.start_timeline(path if hvd.rank() == 0 else f"{path} of another rank")
    hvd.allreduce(torch.ones(4), name="seen")
    hvd.barrier()
    hvd.grouped_allreduce([torch.ones(4), torch.ones(2)], name="group")
    try:
        hvd.allreduce(torch.ones(hvd.rank() + 1), name="odd")
    except hvd.HorovodInternalError:
        pass
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(4), name="not seen")
    return True


def test_a_timeline_shows_what_was_negotiated_and_executed(job, tmp_path):
    path = tmp_path / "timeline.json"
    assert job(ranks=(2,)).run(trace, str(path)) == [True, True]
    events = json.loads(path.read_text())
    rows = {event["args"]["name"]: event["pid"] for event in events if event.get("name") == "process_name"}
    assert set(rows) == {"allreduce.seen", "barrier.noname.1", "grouped_allreduce.group", "allreduce.odd"}
    of = {name: [event for event in events if event.get("pid") == row and event["ph"] == "X"]
          for name, row in rows.items()}
    assert [event["name"] for event in of["allreduce.seen"]] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
    negotiated, executed = of["allreduce.seen"]
    assert negotiated["ts"] + negotiated["dur"] == pytest.approx(executed["ts"], abs=1)
    assert executed["args"]["dtype"] == "float32" and executed["args"]["shape"] == "[[4]]"
    assert [event["name"] for event in of["allreduce.odd"]] == ["NEGOTIATE_ALLREDUCE", "ERROR"]
    assert "Mismatched ALLREDUCE tensor shapes" in of["allreduce.odd"][1]["args"]["error"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_timeline_that_cannot_be_written_says_so(job, tmp_path):
    outcomes = job(ranks=(1,)).attempt(trace, str(tmp_path / "no folder" / "timeline.json"))
    assert outcomes[0].error == "ConfigError" and "no folder" in outcomes[0].text


def test_a_timeline_on_a_full_disk_says_so(job):
    outcomes = job(ranks=(1,)).attempt(trace, "/dev/full")
    assert outcomes[0].error == "ConfigError" and "No space left" in outcomes[0].text


class Slow:
    """Replaces a service: lets another thread add a set while a timeline begins."""

    def __init__(self, adder):
        self.__dict__["adder"] = adder

    def __setattr__(self, name, value):
        if self.adder.ident is None:
            self.adder.start()
            self.adder.join(1)


def begin_a_timeline_while_a_set_is_added(path):
    if hvd.rank() == 1:
        hvd.add_process_set([0])
        return None
    adder = threading.Thread(target=hvd.add_process_set, args=([0],))
    services = runtime.current()._services
    services[-1] = Slow(adder)
    hvd.start_timeline(path)
    adder.join(20)
    del services[-1]
    return {number: service.observer is not None for number, service in services.items()}


def test_a_timeline_begins_while_a_set_is_added(job, tmp_path):
    own = begun(job(ranks=(2,)))
    assert own.run(begin_a_timeline_while_a_set_is_added, str(tmp_path / "t.json")) == [{0: True, 1: True}, None]


PROGRAM = """
import bpsfast.hvd as hvd, torch, threading, os
hvd.init()
before = len(os.listdir("/proc/self/fd"))
assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [1.0] * 3
hvd.shutdown()
hvd.init()
assert hvd.rank() == 0 and hvd.join() == 0
print("threads", sorted(thread.name for thread in threading.enumerate()))
"""


def test_a_job_of_one_process_may_begin_again_and_ends_by_itself():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "bpsfast-hvd" in done.stdout and done.stderr == ""


TRAINING = """
import numpy as np
import torch
import bpsfast.hvd.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                     compression=hvd.Compression.fp16, op=hvd.Average)
losses = []
for step in range(30 + hvd.rank()):
    x = torch.randn(16, 8)
    if step == 29:
        model.eval()  # ranks with more batches than others cannot share batch statistics
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
last = hvd.join()
hvd.broadcast_parameters(model.state_dict(), root_rank=last)
mean = hvd.allreduce(torch.tensor([losses[0], losses[29]]), name="losses")
weights = hvd.allgather_object({name: value.numpy().tobytes() for name, value in model.state_dict().items()})
assert all(each == weights[0] for each in weights), "weights differ"
assert mean[1] < 0.5 * mean[0], mean
print("rank", hvd.rank(), "of", hvd.size(), "last", last, flush=True)
"""


FAILING = """
import torch
import bpsfast.hvd as hvd

hvd.init()
if hvd.rank() == 1:
    raise ValueError("no such file")
try:
    hvd.allreduce(torch.ones(1))
except hvd.HorovodInternalError as exc:
    print("caught", type(exc).__name__, exc, flush=True)
    raise
"""


def test_a_failing_rank_ends_the_others_with_its_reason(tmp_path):
    (tmp_path / "train.py").write_text(FAILING)
    launcher = str(Path(sys.executable).with_name("bpsfast"))
    command = [launcher, "run", "-n", "2", "--timeout", "60", "--", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=80)
    assert done.returncode == 1
    assert "caught PeerLostError rank 1" in done.stdout and "ValueError: no such file" in done.stdout


def test_a_program_of_horovods_runs_under_the_launcher(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    launcher = str(Path(sys.executable).with_name("bpsfast"))
    command = [launcher, "run", "-n", "3", "--nodes", "2", "--timeout", "90", "--", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} of 3 last 2" in done.stdout for rank in range(3))
    assert "Warning" not in done.stderr and "ERROR" not in done.stderr
