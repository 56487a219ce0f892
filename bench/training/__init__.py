"""``bpsfast bench model``: trains whole models with bpsfast and other backends, on synthetic or real data.

Small models are real networks of few layers, for CPUs; full ones have the published number of parameters, for GPUs.
Backends take turns; after each run all ranks of one must have the same weights, bit for bit. `models` has the models,
`samples` the data, `backends` the backends that average gradients, `rank` one rank. ``python -m
bpsfast.bench.training`` is one rank of a job that another launcher has started (``bpsfast run``, ``bpsfast dmlc``,
torchrun, horovodrun).

Source: the artifact of BytePS (OSDI'20), whose training scripts print the same two speeds.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.launcher import ContestantLauncher
from bpsfast.bench.harness.samples import Row, take_turns
from bpsfast.bench.training import backends
from bpsfast.bench.training.models import shape_of
from bpsfast.orchestration.errors import ConfigError

_N_STEPS, _QUICK_STEPS, _N_WARMUP = 10, 2, 2


class Speed(NamedTuple):
    """The speed of steps of *step_s* seconds: *batch* samples of *length* tokens (0: images) on each of *n_ranks*."""

    step_s: float
    batch: int
    n_ranks: int
    length: int = 0

    @property
    def unit(self) -> str:
        """Return the unit, "tokens" or "images"."""
        return "tokens" if self.length else "images"

    @property
    def of_one(self) -> float:
        """Return the images or tokens a second of one rank."""
        return self.batch * (self.length or 1) / self.step_s

    @property
    def total(self) -> float:
        """Return the images or tokens a second of all ranks."""
        return self.of_one * self.n_ranks

    def text(self) -> str:
        """Return the speeds of one rank and of all in a line."""
        one = (f"{1 / self.step_s:,.4g} steps/s, {self.of_one:,.4g} tokens/s" if self.length
               else f"{self.of_one:,.4g} images/s")
        return f"one rank: {one}; total of {self.n_ranks} ranks: {self.total:,.0f} {self.unit}/s"


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train, print the speeds, and return (and write) the records.

    *options*, of which all but the model may be missing or None: model; backend ("bpsfast,gloo"), size ("small" or
    "full"), n_ranks (2, on this machine), batch (of a rank; the model's own), device ("cpu" or "cuda"; a full model
    needs cuda), data (a path, see `samples.real`), n_steps of a turn (10), n_rounds (3), json_path, quick. Raises
    `ConfigError` if one makes no sense, or a package or device is missing.
    """
    given = BenchRun("model", options)
    chosen = settled(given)
    names = chosen.pop("backend").split(",")
    n_ranks = given.get("n_ranks", 2)
    for name in names:
        backends.check(name)
    n_steps = given.get("n_steps") or (_QUICK_STEPS if given.quick else _N_STEPS)
    with ContestantLauncher(n_ranks, 1) as launcher:
        groups = [launcher.training(name, {**chosen, "backend": name}) for name in names]
        rows = [Row(group, "step", 0, label=name) for name, group in zip(names, groups)]
        take_turns(rows, given.rounds(3), n=n_steps, n_warmup=_N_WARMUP)
        digests = {row.name: row.group.ask("digest") for row in rows}
        losses = {row.name: row.group.ask("losses_so_far") for row in rows}
    speeds = {row.name: speed(chosen, row.median_s, n_ranks) for row in rows}
    records = [record(chosen, row, speeds[row.name], losses[row.name], digests[row.name]) for row in rows]
    print(text(chosen, records, speeds), flush=True)
    return given.finish(records)


def weights_agree(records: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all ranks of each backend made the same steps and have the same weights, bit for bit."""
    return not any(record["measured"]["n_wrong"] for record in records if record.get("section") == "training")


def settled(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `rank.TrainingRank` for the *given* ones; raises `ConfigError` for bad ones."""
    name, size = given["model"], given.get("size") or "small"
    shape = shape_of(name, size)
    batch = given.get("batch") or shape.batch
    device, data = given.get("device") or ("cuda" if size == "full" else "cpu"), str(given.get("data") or "")
    if data and not Path(data).exists():
        raise ConfigError(f"--data {data}: there is no such file or folder")
    backend = given.get("backend") or "bpsfast"
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch sees no GPU here" if size == "small" else
                              "torch sees no GPU here; --device cpu trains the full model even so, slowly")
    elif "nccl" in backend.split(","):
        raise ConfigError("backend nccl averages on GPUs only: --device cuda")
    return {"model": name, "size": size, "backend": backend, "batch": batch, "device": device, "data": data}


def speed(chosen: Mapping[str, Any], step_s: float, n_ranks: int) -> Speed:
    """Return the speed of steps of *step_s* seconds."""
    return Speed(step_s, chosen["batch"], n_ranks, shape_of(chosen["model"], chosen["size"]).length)


def text(chosen: Mapping[str, Any], records: Sequence[Mapping[str, Any]], speeds: Mapping[str, Speed]) -> str:
    """Return one line for each backend."""
    lines = [f"# {chosen['model']}, {chosen['size']}, on {chosen['data'] or 'synthetic data'}; a step of a rank takes "
             f"{chosen['batch']} samples; {chosen['device']}"]
    for record in records:
        name, measured = record["chosen"]["backend"], record["measured"]
        took_ms = 1e3 * measured["median_s"]
        losses = measured["losses"]
        alike = "alike" if weights_agree([record]) else "DIFFERENT"
        lines.append(f"{name:8} {took_ms:.1f} ms a step; {speeds[name].text()}; loss {losses[0]:.4g} "
                     f"-> {losses[-1]:.4g} in {len(losses)} steps; weights {alike} on all ranks")
    return "\n".join(lines)


def record(chosen: Mapping[str, Any], row: Row, found: Speed, losses: Sequence[Sequence[float]],
           digests: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return one backend's row of the result file; *losses* and *digests* have an item for each rank."""
    return {
        "section": "training",
        "chosen": {**chosen, "backend": row.name, "n_ranks": found.n_ranks, "length": found.length,
                   "n_per_round": row.n_per_round, "n_warmup": row.n_warmup},
        "measured": {"samples_s": row.samples_s, "median_s": row.median_s, "of_one": found.of_one, "total": found.total,
                     "unit": f"{found.unit}/s", "cpu_busy": row.cpu_busy, "cpu_s": row.cpu_s, "losses": losses[0],
                     "digests": list(digests), "n_wrong": sum(each != digests[0] for each in digests)},
    }
