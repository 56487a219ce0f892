"""The commands and options of ``bpsfast bench``; each benchmark is imported when it runs."""
from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import click

from bpsfast.base.exit_codes import FAILED, exit_on_error
from bpsfast.tools.commands.options import FullHelpGroup, job_options, overrides, set_option, take_plan

from . import cli_options

_COUNT = click.IntRange(1)
#: Other names of benches.
_ALIASES = {"transport": "post", "allreduce": "ddp", "compress": "codecs", "placement": "optimum"}


class _Benches(FullHelpGroup):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, _ALIASES.get(cmd_name, cmd_name))


@click.group(cls=_Benches)
def command() -> None:
    """Measure this machine: benchmarks that compare alternatives in one run, with --compare also other all-reduces.

    \b
    bpsfast bench kernels --quick
    bpsfast bench push_pull -n 4 --nodes 2 --compare gloo --json out.json
    """


def _benchmark(name: str, module: str = "") -> Callable[[Callable], click.Command]:
    """Make a command of a function that has options and a help text, but no statements.

    The command passes all options as one dictionary to `run` of the benchmark's *module* (default: *name*), and ends
    with exit code 1 where that returns False.
    """
    def decorate(described: Callable) -> click.Command:
        @functools.wraps(described)
        def call(**options: Any) -> None:
            if importlib.import_module(f"bpsfast.bench.{module or name}").run(options) is False:
                raise SystemExit(FAILED)

        return command.command(name)(exit_on_error(call))

    return decorate


@_benchmark("suite")
@click.option("--quick/--full", default=True, show_default=True, help="Run for minutes, or for most of an hour.")
@click.option("--only", help="Benchmarks to run.  [default: all that can run here]", metavar="NAME[,NAME]")
@click.option("-o", "--out", "folder", type=click.Path(file_okay=False), default="out/suite", show_default=True,
              help="Folder for the report and the result files.")
def bench_suite() -> None:
    """Run all benchmarks that this machine can run, and write one report (report.html, report.json) with a verdict.

    Exit code 1 if a result was wrong or a benchmark failed.
    """


@_benchmark("kernels")
@cli_options.result(quick="Use fewer sizes and samples.")
def bench_kernels() -> None:
    """Measure the rate of each sum kernel against C, NumPy and torch."""


@_benchmark("summation", "paper.summation")
@click.option("--workers", "n_workers", type=click.IntRange(2, 8), help="Number of gradients in a sum.  [default: 4]")
@click.option("--lines", help="Link rates to keep up with, Gbit/s.  [default: 10,25,100,400]", metavar="N[,N]")
@cli_options.rounds("each operation", default=15)
@cli_options.plot()
@cli_options.result(quick="Run fewer and shorter rounds.")
def bench_summation() -> None:
    """Measure Gbit/s of gradients that a core sums or updates with optimizers, and the cores for each link rate."""


@_benchmark("codecs")
@cli_options.rounds("each contestant", default=8)
@cli_options.result(quick="Run three codecs, two rounds.")
def bench_codecs() -> None:
    """Measure bytes per second of each compression codec, and of memcpy."""


@command.command("push_pull")
@click.option("-n", "-np", "--num-ranks", "n_ranks", type=_COUNT,
              help="Number of ranks.  [default: 2; with hosts, all slots]")
@click.option("--nodes", "n_nodes", type=_COUNT, help="Number of simulated machines on this host.  [default: 1]")
@job_options
@click.option("--compare", help="Also measure these in the same run: gloo, mpi (Open MPI), mpich, impi (Intel MPI).",
              metavar="NAME[,NAME]")
@click.option("--sizes", help="Sizes: every power of two (4K:256M), or a list (4K,1M).", metavar="MIN:MAX|N,N")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--attach", help="Only read the counters of a running job's nodes (metrics_port).",
              metavar="HOST:PORT[,...]")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="How long, with --attach.  [default: 10]")
@cli_options.result(quick="Use fewer sizes and samples.")
@exit_on_error
def bench_push_pull(**options: Any) -> None:
    """Measure time and bandwidth of push_pull by size, and how near they come to the bound (not between hosts)."""
    from . import push_pull
    from .push_pull import attach

    if options["attach"] is not None:
        attach.run(options)
        return
    if options["seconds"] is not None:
        raise click.UsageError("--seconds says how long --attach looks: without it there is nothing to wait for")
    plan = take_plan(options, ["n_nodes"])
    push_pull.run(options, plan)


@_benchmark("saturation", "paper.saturation")
@click.option("--curves", help="Curves: size, ranks, nodes, partition, credit.  [default: all]", metavar="NAME[,NAME]")
@click.option("--sizes", help="Sizes of the first curve.  [default: 4K:64M]", metavar="MIN:MAX|N,N")
@click.option("--compare", help="Also measure this in the curve over sizes: gloo.", metavar="NAME")
@cli_options.rounds("each point", default=5)
@cli_options.plot()
@cli_options.result(quick="Measure only the ends of each curve.")
def bench_saturation() -> None:
    """Measure goodput, latency, wire bytes, CPU and memory of push_pull over size, ranks, nodes, partitions, credit."""


@_benchmark("post")
@click.option("--nodes", "n_nodes", type=click.IntRange(1, 2), help="Nodes for the two ranks.  [default: 1, then 2]")
@click.option("--sizes", help="Message sizes.  [default: 8,4K,64K,1M,16M,64M]", metavar="N,N")
@cli_options.rounds("each contestant", default=5)
@cli_options.result(quick="Run two sizes, one round.")
def bench_post() -> None:
    """Measure a message from rank to rank and back, and send and recv of gloo."""


@_benchmark("optimum", "paper.optimum")
@click.option("--sets", help="Sets of cells: equal, full, unequal, models.  [default: all]", metavar="NAME[,NAME]")
@click.option("--workers", help="Numbers of workers with equal links.  [default: 2,4,8]", metavar="N[,N]")
@cli_options.rounds("each contestant", default=3)
@cli_options.result(quick="Run fewer cells and rounds.")
def bench_optimum() -> None:
    """Measure steps with n workers and k helpers, each in a network namespace, compared with the model. Needs root."""


@_benchmark("schedule")
@click.option("--workers", "n_workers", type=_COUNT, help="Number of machines that train.  [default: 4]")
@click.option("--helpers", "n_helpers", type=click.IntRange(0), help="Number of machines that only sum.  [default: 2]")
@click.option("--model", help="Built-in model, with tensors N times smaller.  [default: vgg16/32]", metavar="NAME/N")
@click.option("--ratio", type=click.FloatRange(0, min_open=True),
              help="Seconds of computing per second of communication.  [default: 0.75]")
@click.option("--ways", help="fifo|priority, crossing|DDP gloo|...  [default: all]", metavar="NAME[|NAME]")
@cli_options.rounds("each method", default=3)
@cli_options.result(quick="Run three methods, one round.")
def bench_schedule() -> None:
    """Compare training by priority and without a barrier with order of arrival, and with DDP over gloo. Needs root."""


@_benchmark("compressed")
@click.option("--machines", help="Number of machines, each with one rank.  [default: 2,4]", metavar="N[,N]")
@click.option("--codecs", help="Codecs as for `bpsfast plan --compression`, separated by bars.  [default: six]",
              metavar="CODEC[|CODEC]")
@click.option("--model", help="Built-in model.  [default: resnet18]")
@click.option("--rate-mbit", type=click.FloatRange(1), help="Rate of each link in each direction.  [default: 100]")
@click.option("--compute-s", type=click.FloatRange(0), help="Computing time of a step (a sleep).  [default: 0.1]")
@cli_options.rounds("each codec", default=3)
@cli_options.result(quick="Run two codecs on two machines, one round.")
def bench_compressed() -> None:
    """Measure training steps on slow links with each codec and without: time, and bytes on the wire. Needs root."""


@_benchmark("accuracy")
@click.option("--codecs", help="Codecs as for `bpsfast plan --compression`, separated by bars.  [default: seven]",
              metavar="CODEC[|CODEC]")
@click.option("--seeds", "n_seeds", type=_COUNT, help="Training runs with each codec.  [default: 6]")
@click.option("--epochs", "n_epochs", type=_COUNT, help="Epochs of each training run.  [default: 40]")
@cli_options.result(quick="Use fewer codecs and seeds.")
def bench_accuracy() -> None:
    """Compare the accuracy that two machines reach with each codec and without. Needs scikit-learn."""


@_benchmark("ddp")
@click.option("-n", "-np", "--num-ranks", "n_ranks", type=_COUNT, help="Ranks on this machine.  [default: 2]")
@click.option("--sizes", help="Sizes of the collectives.  [default: 1K,16K,256K,4M,64M]", metavar="N[,N]")
@click.option("--operations", help="Collectives to measure, '' for none.  [default: all]", metavar="NAME[,NAME]")
@cli_options.rounds("each backend", default=5)
@cli_options.result(quick="Run fewer sizes, one round.")
def bench_ddp() -> None:
    """Measure DistributedDataParallel and torch collectives with the backends "bpsfast" and gloo. Needs torch."""


@command.command("model")
@click.argument("model", metavar="NAME")
@click.option("--backend", metavar="NAME[,NAME]",
              help="Libraries that average gradients: bpsfast, gloo, nccl, horovod.  [default: bpsfast]")
@click.option("--size", type=click.Choice(["small", "full"]), default="small", show_default=True,
              help="Few layers, for CPUs, or the published model, for GPUs.")
@click.option("-n", "-np", "--num-ranks", "n_ranks", type=_COUNT, help="Ranks on this machine.  [default: 2]")
@click.option("--batch", type=_COUNT, help="Samples of a rank in a step.  [default: that of the model]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda for full models]")
@click.option("--data", type=click.Path(), metavar="PATH",
              help="Data set: an .npz file, or a folder of images for each class.  [default: synthetic]")
@click.option("--steps", "n_steps", type=_COUNT, help="Steps in a round.  [default: 10]")
@cli_options.rounds("each backend", default=3)
@cli_options.result(quick="Run two steps, one round.")
@exit_on_error
def bench_model(**options: Any) -> None:
    """Train resnet50, vgg16, transformer, bert-large, gpt2 or ugatit; report images/s or tokens/s.

    Exit code 1 if ranks end with different weights.
    """
    from . import training

    if not training.weights_agree(training.run(options)):
        raise SystemExit(FAILED)


@command.command("device")
@click.option("--device", type=click.Choice(["cuda", "host"]), default="cuda", show_default=True,
              help="A GPU, or host memory treated as one, which only shows that the path works.")
@click.option("-n", "-np", "--num-ranks", "n_ranks", type=_COUNT, help="Ranks that share the device.  [default: 2]")
@click.option("--sizes", help="Sizes of the arrays.  [default: 1M,4M,16M,64M,256M]", metavar="N[,N]")
@click.option("--parts", help="Parts: sums, backward, stages, training, memory.  [default: all]", metavar="NAME[,NAME]")
@set_option
@cli_options.rounds("each operation", default=5)
@cli_options.result(quick="Run fewer sizes, two rounds.")
@exit_on_error
def bench_device(assignments: tuple[str, ...], **options: Any) -> None:
    """Measure push_pull of ranks that share a GPU: bound by copies, stream stalls, overlap, results, memory."""
    from . import device

    if not device.run({**options, "settings": overrides(assignments)}):
        raise SystemExit(FAILED)


@_benchmark("frameworks")
@click.option("-n", "-np", "--num-ranks", "n_ranks", type=_COUNT, help="Ranks on this machine.  [default: 2]")
@cli_options.rounds("each row", default=10)
@cli_options.result(quick="Run one round.")
def bench_frameworks() -> None:
    """Compare arrays of the installed frameworks with NumPy arrays: one large tensor and 161 small ones."""


@_benchmark("rows")
@click.option("--table", "table_size", help="Size of the table.  [default: 2G]", metavar="SIZE")
@click.option("--row", "row_elements", type=_COUNT, help="Number of float32 elements in a row.  [default: 128]")
@click.option("--share", type=click.FloatRange(0, 1, min_open=True),
              help="Share of the rows that a rank pushes in a step.  [default: 0.01]")
@cli_options.rounds("either", default=5)
@cli_options.result(quick="Use a small table, two rounds.")
def bench_rows() -> None:
    """Measure bytes and time of pushing a few rows of a large table between two machines, and of a dense array."""


@_benchmark("autotune")
@click.option("--starts", help="Bad partition_bytes to start from.  [default: 64000,65536000]", metavar="N[,N]")
@cli_options.rounds("what was chosen and the grid's best", default=3)
@cli_options.result()
def bench_autotune() -> None:
    """Compare tuning during training, from bad settings, with a grid search. Needs root and torch; ten minutes."""


@_benchmark("overhead")
@click.option("--against", type=click.Path(), metavar="PYTHON",
              help="The interpreter of another installation of bpsfast, measured in turns with this one.")
@click.option("--elements", "n_elements", type=_COUNT, help="float32 elements of a tensor.  [default: 256]")
@cli_options.rounds("each version", default=5)
@cli_options.result(quick="One short turn.")
def bench_overhead() -> None:
    """Time, Python calls and locks of a tensor between the backward hook and its announcement. Needs torch."""


@_benchmark("neighbour")
@click.option("--cores", type=_COUNT, help="Number of cores of the helper.  [default: 1]")
@click.option("--nic-rate", type=click.FloatRange(0, min_open=True), metavar="GBPS",
              help="Most that it sends, and receives, Gbit/s.  [default: 0.2]")
@click.option("--loads", metavar="SHARE[,SHARE]",
              help="Share of the time in which the other job uses its cores.  [default: 0.5,1]")
@click.option("--windows", "n_windows", type=_COUNT, help="Number of windows of each kind.  [default: 20]")
@click.option("--at-most-s", type=click.FloatRange(0, min_open=True),
              help="Give up after this time if other programs interfere.  [default: 600 per load]")
@click.option("--window-s", type=click.FloatRange(0, min_open=True), help="Length of a window.  [default: 1]")
@cli_options.result(quick="Measure fewer windows.")
def bench_neighbour() -> None:
    """Measure the step time of another job on this machine while a limited helper works, and while it is idle."""


@_benchmark("scale")
@click.option("--nodes", help="Numbers of machines with ranks.  [default: 8,64,256,1024]", metavar="N[,N]")
@click.option("--ranks-per-node", "n_local", type=_COUNT, help="Ranks of each.  [default: 8]")
@click.option("--helpers", "n_helpers", type=_COUNT, help="Number of helpers, of which one is lost.  [default: 4]")
@click.option("--tensors", "n_tensors", type=click.IntRange(1, 60000), help="Tensors of a model.  [default: 16000]")
@click.option("--real", help="Also run jobs of N real nodes with one rank per node.", metavar="N[,N]")
@cli_options.result(quick="Model 8 and 64 machines, and 1000 tensors.")
def bench_scale() -> None:
    """Measure CPU time, memory and messages of the scheduler of a large job, whose machines are modelled.

    With --real also what real nodes take: CPU time of the start, threads, memory.
    """


@_benchmark("chaos")
@click.option("--seeds", type=_COUNT, default=20, show_default=True, help="Number of trials, each a job of its own.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="Seed of the first trial.")
@cli_options.load()
@cli_options.result()
def bench_chaos() -> None:
    """Kill and stop processes of training jobs and check that sums stay right, or the job fails with a clear error."""


@_benchmark("worker_loss", "worker_loss.parts")
@click.option("--parts", help="Parts: cost, pause, torchft, rejoin.  [default: all]", metavar="NAME[,NAME]")
@click.option("--sizes", help="Sizes of the sums whose cost is measured.  [default: 4K,64K,1M,16M,64M]",
              metavar="MIN:MAX|N,N")
@click.option("--trials", "n_trials", type=_COUNT,
              help="Trainings in which a rank is killed, on one machine and on four.  [default: 100 each]")
@click.option("--silent", "n_silent", type=click.IntRange(0),
              help="Trainings in which a machine is stopped; each waits for its lease.  [default: 5]")
@click.option("--torchft", "n_torchft", type=click.IntRange(0),
              help="Trainings with torchft, by each of its settings; 0: none.  [default: 20]")
@click.option("--rejoin", "n_rejoin", type=click.IntRange(0),
              help="Trainings in which a lost worker is replaced.  [default: 9]")
@cli_options.rounds("each mode", default=11)
@cli_options.result(quick="Run two sizes, few trials.")
def bench_worker_loss() -> None:
    """Measure what on_worker_loss = continue costs a step, and how long a loss stops the other ranks, beside torchft.

    Also how many steps they make while a lost worker is replaced. Exit code 1 if a sum was wrong or a job hung.
    """


@_benchmark("soak")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True)
@click.option("--transport", type=click.Choice(["auto", "tcp", "shm"]), default="tcp", show_default=True)
@click.option("--losses", type=click.IntRange(0), default=0, show_default=True,
              help="Workers to kill and replace, in an elastic job that goes on without them.")
@cli_options.load()
@cli_options.result()
def bench_soak() -> None:
    """Run a long training job and check that sums are right and memory, descriptors and threads do not grow."""


@_benchmark("helpers")
@click.option("--steps", type=click.IntRange(40), default=400, show_default=True)
@click.option("--size-mb", type=click.FloatRange(0.1), default=24.0, show_default=True, help="MB of gradients a step.")
@click.option("--placement", type=click.Choice(["optimal", "ps"]), default="ps", show_default=True)
@cli_options.result()
def bench_helpers() -> None:
    """Train with 4, then 2, then 4 helpers; check the parameters bit by bit and measure the pauses."""


@_benchmark("ladder", "paper.ladder")
@click.argument("peer", required=False, metavar="[HOST]")
@click.option("--listen", is_flag=False, flag_value="", metavar="[ADDRESS]",
              help="Serve one run of `bench ladder` on the other host.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the control connection.  [default: 7810]")
@click.option("--devices", metavar="A[,B]", help="RDMA device of this end; with both ends here, also of the service.")
@click.option("--models", metavar="NAME[/N],...", help="vgg19, resnet50, inception-bn; /N: 1/N of every tensor.")
@cli_options.rounds("each variant", default=5)
@cli_options.result(quick="Run one round with small fractions of the models.")
def bench_ladder() -> None:
    """Measure the cost of each wrong use of RDMA, and whether tcp would be faster.

    Run `bpsfast bench ladder --listen` on one host and `bpsfast bench ladder HOST` on the other; without either, both
    ends are on this host. The control connection is not authenticated. Exit code 3 without an RDMA device.
    """
