"""``bpsfast simulate`` simulates the time of a training step on a given cluster."""
from __future__ import annotations

from typing import Any

import click

from ...base import exit_codes, output
from ...orchestration.errors import ConfigError
from ..simulator.all_reduce import Ring
from ..simulator.network import Costs, uniform
from ..simulator.simulation import Options, Outcome, simulate
from ..simulator.workload import MODELS, build

_STRATEGIES = ("ring", "all-reduce", "ps", "colocated", "optimal")

_EXAMPLES = """

    \b
    bpsfast simulate --model vgg16 -n 8 -k 4 --nic 25
    bpsfast simulate --model bert-large -n 4096 -k 4096 --nic 100 --compute 490
    bpsfast simulate --model gpt2 -n 8 --nic 10 --cross-barrier --json
    bpsfast simulate --model vgg16 -n 8 --strategy ring --strategy all-reduce
"""


@click.command(help="Simulate the time of a training step: ring all-reduce in order of arrival (ring) or of "
               "priority (all-reduce), PS, colocated, optimal." + _EXAMPLES)
@click.option("--model", required=True, type=click.Choice(sorted(MODELS)), help="Model to simulate.")
@click.option("-n", "--workers", type=int, required=True, help="Number of machines with ranks.")
@click.option("-k", "--helpers", type=int, default=0, show_default=True, help="Number of machines that only sum.")
@click.option("--nic", "nic_gbits", type=float, default=100.0, show_default=True, help="Rate of every NIC [Gbit/s].")
@click.option("--compute", "compute_ms", type=float, default=300.0, show_default=True,
              help="Forward and backward time of a step [ms].")
@click.option("--strategy", "strategies", multiple=True, type=click.Choice(_STRATEGIES),
              help="May be repeated.  [default: all that fit the machines]")
@click.option("--gpus", type=int, default=1, show_default=True, help="Ranks of the ring on each machine.")
@click.option("--overhead", "overhead_us", type=float, default=0.0, show_default=True, help="Cost of a message [us].")
@click.option("--latency", "latency_us", type=float, default=0.0, show_default=True,
              help="Latency between machines [us].")
@click.option("--sum-rate", "sum_gbits", type=float, default=float("inf"), show_default=True,
              help="Rate at which an owner sums inputs [Gbit/s].")
@click.option("--inside-rate", "inside_gbits", type=float, default=float("inf"), show_default=True,
              help="Rate of reduce and broadcast inside a machine [Gbit/s].")
@click.option("--partition", "partition_nbytes", type=int, default=4_096_000, show_default=True,
              help="Largest partition of a tensor [bytes].")
@click.option("--credit", "credit_nbytes", type=int, default=16_777_216, show_default=True,
              help="Most bytes in flight to one peer, or in the ring.")
@click.option("--priority/--no-priority", default=True, show_default=True,
              help="Send in order of priority, or of arrival.")
@click.option("--cross-barrier", is_flag=True, help="Let the forward pass of a layer wait for its own sums only.")
@click.option("--interleave", is_flag=True, help="Place partitions in forward order instead of largest first.")
@click.option("--fold/--full", default=None, help="Simulate one machine for each role, or every machine.  "
              "[default: fold if a full simulation would take minutes]")
@click.option("--steps", "n_steps", type=int, default=4, show_default=True, help="Number of steps to simulate.")
@output.options(tabular=True)
@exit_codes.exit_on_error
def command(form: output.OutputOptions, **asked: Any) -> None:
    """Simulate and show."""
    rate = _bytes(asked["nic_gbits"], "--nic")
    inside = _bytes(asked["inside_gbits"], "--inside-rate")
    costs = Costs(asked["overhead_us"] / 1e6, asked["latency_us"] / 1e6, _bytes(asked["sum_gbits"], "--sum-rate"),
                  reduce_rate=inside, broadcast_rate=inside)
    options = Options(asked["priority"], asked["cross_barrier"], True, asked["interleave"],
                      asked["credit_nbytes"], asked["partition_nbytes"], ring=Ring(asked["gpus"]), fold=asked["fold"])
    cluster = uniform(asked["workers"], asked["helpers"], rate, costs)
    job = build(asked["model"], asked["compute_ms"] / 1e3)
    chosen = asked["strategies"] or [s for s in _STRATEGIES if s != "ps" or asked["helpers"]]
    workers = cluster._replace(machines=cluster.machines[:cluster.n_workers])  # colocated servers use no helpers
    found = [simulate(job, workers if strategy == "colocated" else cluster, strategy, options, asked["n_steps"])
             for strategy in chosen]
    rows = [("strategy", "step_ms", "efficiency", "simulated", "events"), *(
        (o.strategy, f"{o.step_s * 1e3:.3f}", f"{o.efficiency:.3f}", "folded" if o.is_folded else "in full",
         str(o.n_events)) for o in found)]
    output.show(form, lambda: f"{asked['model']}: {job.nbytes / 1e6:.0f} MB of gradients, {asked['workers']} machines, "
                f"{asked['helpers']} helpers, {asked['nic_gbits']:g} Gbit/s\n" + output.columns(rows, (1, 2, 4)),
                {"model": asked["model"], "gradient_bytes": job.nbytes, "workers": asked["workers"],
                 "helpers": asked["helpers"], "nic_rate_bytes_per_s": rate, "results": [_data(o) for o in found]}, rows)


def _data(outcome: Outcome) -> dict[str, Any]:
    return {"strategy": outcome.strategy, "step_s": outcome.step_s, "first_step_s": outcome.first_s,
            "compute_s": outcome.compute_s, "efficiency": outcome.efficiency, "folded": outcome.is_folded,
            "events": outcome.n_events, "steps": outcome.n_steps}


def _bytes(gbits: float, option: str) -> float:
    if not gbits > 0:
        raise ConfigError(f"{option} is {gbits} Gbit/s; a rate must be above zero")
    return gbits * 1e9 / 8
