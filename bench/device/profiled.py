"""Asks torch's profiler whether a backward pass with `DistributedOptimizer` ever waits for the GPU. CUDA only.

Autograd runs hooks in a thread of its own for each GPU, so every CUDA call counts that waits in the thread that called
backward, or in one that ran hooks, between the begin and the end of backward. A deliberate wait afterwards shows that
the profiler would have seen one.
"""
from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bpsfast.base.process_identity import folder_prefix

#: Calls that block the host until the device has done something: of the runtime, and of the driver below it.
WAITS = frozenset({
    "cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaThreadSynchronize", "cudaMemcpy",
    "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"})
_CALLS = ("cuda_runtime", "cuda_driver")
BACKWARD, HOOK, CONTROL = "bench backward", "bench hook", "bench control"
_N_FEATURES, _N_LAYERS, _N_STEPS = 2048, 8, 3


def measure() -> dict[str, Any]:
    """Profile some steps on this rank; return what `judged` finds."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from bpsfast import torch as bps

    model = torch.nn.Sequential(*(torch.nn.Linear(_N_FEATURES, _N_FEATURES) for _ in range(_N_LAYERS))).cuda()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: _mark())
    named = [(f"profiled.{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=named)
    x = torch.randn(4096, _N_FEATURES, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        with record_function(BACKWARD):
            loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_N_STEPS):
            step()
        with record_function(CONTROL):
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix=folder_prefix("profile")) as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return judged(json.loads(path.read_text())["traceEvents"])


def _mark() -> None:
    from torch.profiler import record_function

    with record_function(HOOK):
        pass


def judged(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the *events* of a Chrome trace show.

    n_backwards; n_hooks; threads: how many ran either; n_calls of CUDA in them meanwhile, and the longest, in us;
    waits: those that wait, by name; sees_waits: whether the deliberate wait was seen, without which nothing is known.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    spans = {title: [event for event in complete if event.get("name") == title
                     and event.get("cat") in ("user_annotation", "cpu_op")] for title in (BACKWARD, HOOK, CONTROL)}
    calls = [event for event in complete if event.get("cat") in _CALLS]
    threads = {event["tid"] for event in [*spans[BACKWARD], *spans[HOOK]]}
    inside = [call for call in calls if call["tid"] in threads and _is_within(call, spans[BACKWARD])]
    waits: dict[str, int] = {}
    for call in inside:
        if call["name"] in WAITS:
            waits[call["name"]] = waits.get(call["name"], 0) + 1
    return {"n_backwards": len(spans[BACKWARD]), "n_hooks": len(spans[HOOK]), "threads": len(threads),
            "n_calls": len(inside), "longest_us": max((float(call["dur"]) for call in inside), default=0.0),
            "waits": waits,
            "sees_waits": any(call["name"] in WAITS and _is_within(call, spans[CONTROL]) for call in calls)}


def _is_within(event: Mapping[str, Any], spans: Iterable[Mapping[str, Any]]) -> bool:
    return any(span["ts"] <= event["ts"] <= span["ts"] + span["dur"] for span in spans)
