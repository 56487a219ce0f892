"""``bpsfast plan`` predicts the time of a training step before anything is started."""
from __future__ import annotations

import click

from ...base import exit_codes, output
from ...orchestration.errors import ConfigError
from ..planner import authors_table, catalog, machine_list, plan_text, prediction
from ..planner.catalog import Compute, Model


@click.command()
@click.option("--workers", metavar="N|RATES", help="Machines with ranks: their number, or their NICs in Gbit/s "
              "(4x25,4x10).")
@click.option("--helpers", "--servers", default="0", show_default=True, metavar="K|RATES",
              help="Machines that only sum: their number, or NICs in Gbit/s; 25/8 sums at most 8 Gbit/s.")
@click.option("--nic", "nic_gbps", type=float, default=25.0, show_default=True, metavar="RATE",
              help="NIC of machines given by number only, Gbit/s each way.")
@click.option("--model", metavar="NAME|FILE", help="Built-in model, or a file with lines NAME SHAPE (or JSON).")
@click.option("--from-torch", "torch_place", metavar="MODULE:CALLABLE", help="Function that returns a torch module.")
@click.option("--dtype", help="Dtype of gradients on the wire, instead of the model's.")
@click.option("--batch", type=click.IntRange(1), help="Scale the model's compute times to this batch.")
@click.option("--forward-ms", type=click.FloatRange(0), help="Time of one forward pass.")
@click.option("--backward-ms", type=click.FloatRange(0), help="Time of one backward pass.")
@click.option("--partition-bytes", "partition_nbytes", default=4_096_000, show_default=True,
              type=click.IntRange(4096), help="Largest partition of a tensor.")
@click.option("--compression", metavar="KIND[:OPTIONS]", help="Predict what a codec gains and for which tensors, "
              "such as topk:k=0.01,error_feedback.")
@click.option("--copy-rate", "copy_gbytes", default=50.0, show_default=True, metavar="RATE",
              type=click.FloatRange(0, min_open=True), help="For --compression: GB/s that all summing threads of a "
              "machine copy; the cost of codec kernels is measured in copies.")
@click.option("--table", type=click.Choice(["models"]), help="Instead, recompute the models table of BytePS's authors.")
@output.options(tabular=True)
@exit_codes.exit_on_error
def command(workers: str | None, helpers: str, nic_gbps: float, model: str | None, torch_place: str | None,
            dtype: str | None, batch: int | None, forward_ms: float | None, backward_ms: float | None,
            partition_nbytes: int, compression: str | None, copy_gbytes: float, table: str | None,
            form: output.OutputOptions) -> None:
    """Predict communication and step time for a ring, servers only, colocated servers and the optimal placement.

    "formula" is the closed form; "placed" is the time with whole partitions and the owners that a job would choose.
    Nothing is measured: NICs are assumed to carry their rate both ways, and sums to cost nothing unless limited.

    \b
    bpsfast plan --workers 8 --helpers 4 --nic 25 --model vgg16
    bpsfast plan --workers 7x10,2.5 --model bert-large
    bpsfast plan --workers 4 --helpers 2x25/8 --from-torch mynet:build
    bpsfast plan --workers 4 --model resnet18 --compression topk:k=0.01
    bpsfast plan --table models
    """
    if table is not None:
        return output.show(form, authors_table.text, authors_table.data(), authors_table.rows(authors_table.lines()))

    if workers is None:
        raise ConfigError("--workers is missing: the number of machines with ranks")
    codec = None if compression is None else prediction.parse(compression)
    machines = [*machine_list.parse(workers, True, nic_gbps), *machine_list.parse(helpers, False, nic_gbps)]
    if (model is None) == (torch_place is None):
        raise ConfigError("give --model or --from-torch" if model is None else "--model and --from-torch: choose one")
    network = catalog.named(model, dtype) if model is not None else catalog.from_torch(str(torch_place), dtype)
    compute = _compute(network, batch, forward_ms, backward_ms)
    made = prediction.make(network, machines, compute=compute, partition_nbytes=partition_nbytes, codec=codec,
                           copy_rate=copy_gbytes * 1e9)
    output.show(form, lambda: plan_text.text(made), plan_text.data(made), plan_text.rows(made))


def _compute(model: Model, batch: int | None, forward_ms: float | None, backward_ms: float | None) -> Compute | None:
    if (forward_ms is None) != (backward_ms is None):
        raise ConfigError("--forward-ms and --backward-ms: give both, or neither")
    if forward_ms is not None and backward_ms is not None:
        if batch is not None:
            raise ConfigError("--batch scales the built-in compute times: --forward-ms and --backward-ms replace them")
        return Compute(forward_ms / 1e3, backward_ms / 1e3, 0, "", "")
    if batch is not None and model.compute is None:
        raise ConfigError(f"--batch: no compute times of {model.title} are built in; give --forward-ms and "
                          "--backward-ms")
    return model.compute if model.compute is None or batch is None else model.compute.of_batch(batch)
