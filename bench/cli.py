"""``bpsfast bench``: the benches' options; each bench is imported when it runs."""
from __future__ import annotations

from typing import Any

import click

from ..base.exit_codes import exit_on_error
from ..tools.commands.options import FullHelpGroup, job_options, overrides, set_option, take_plan
from . import cli_options

_COUNT = click.IntRange(1)


#: Other names of benches.
_ALIASES = {"transport": "post", "allreduce": "ddp", "compress": "codecs", "placement": "optimum"}


class _Benches(FullHelpGroup):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, _ALIASES.get(cmd_name, cmd_name))


@click.group(cls=_Benches)
def command() -> None:
    """Measure this machine: figures of one run beside each other, with --compare beside others' all-reduce.

    \b
    bpsfast bench kernels --quick
    bpsfast bench push_pull -n 4 --nodes 2 --compare gloo --json out.json
    """


@command.command("suite")
@click.option("--quick/--full", default=True, show_default=True, help="Some minutes, or most of an hour.")
@click.option("--only", help="Some of its benches.  [default: all that can run here]", metavar="NAME[,NAME]")
@click.option("-o", "--out", "folder", type=click.Path(file_okay=False), default="out/suite", show_default=True,
              help="Folder of the report and of the result files.")
@exit_on_error
def bench_suite(**options: Any) -> None:
    """All benches that this machine can run, and one report (report.html, report.json) with a verdict of the machine.

    Exit code 1 if a result was wrong, or a bench failed.
    """
    from . import suite

    if not suite.run(options):
        raise SystemExit(1)


@command.command("kernels")
@cli_options.result(quick="Fewer sizes and samples.")
@exit_on_error
def bench_kernels(json_path: str | None, quick: bool) -> None:
    """Sums per second of each kernel against C, NumPy and torch."""
    from . import kernels

    kernels.run(json_path=json_path, quick=quick)


@command.command("summation")
@click.option("--workers", "n_workers", type=click.IntRange(2, 8), help="Gradients of one sum.  [default: 4]")
@click.option("--lines", help="Rates to keep up with, Gbit/s.  [default: 10,25,100,400]", metavar="N[,N]")
@cli_options.rounds("each operation", default=15)
@cli_options.plot()
@cli_options.result(quick="Fewer and shorter turns.")
@exit_on_error
def bench_summation(**options: Any) -> None:
    """Gbit/s of gradients that a core sums, beside optimizers' updates, and cores needed for each network card."""
    from .paper import summation

    summation.run(options)


@command.command("codecs")
@cli_options.rounds("each contestant", default=8)
@cli_options.result(quick="Three codecs, two turns.")
@exit_on_error
def bench_codecs(**options: Any) -> None:
    """Bytes per second of each codec of compression, beside memcpy's."""
    from . import codecs

    codecs.run(options)


@command.command("push_pull")
@click.option("-n", "-np", "--num-ranks", "n_ranks", type=_COUNT,
              help="Ranks in all.  [default: 2; of hosts, all slots]")
@click.option("--nodes", "n_nodes", type=_COUNT, help="Machines to spread them over, played here.  [default: 1]")
@job_options
@click.option("--compare", help="Peers in the same run: gloo, mpi.", metavar="NAME[,NAME]")
@click.option("--sizes", help="Every power of two (4K:256M), or a list (4K,1M).", metavar="MIN:MAX|N,N")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--attach", help="Only read what nodes of a running job count (their metrics_port).",
              metavar="HOST:PORT[,...]")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="How long, with --attach.  [default: 10]")
@cli_options.result(quick="Fewer sizes and samples.")
@exit_on_error
def bench_push_pull(**options: Any) -> None:
    """Time and bandwidth of push_pull by size, with the bound and how near it comes; between hosts without a bound."""
    from . import push_pull
    from .push_pull import attach

    if options["attach"] is not None:
        attach.run(options)
        return
    if options["seconds"] is not None:
        raise click.UsageError("--seconds says how long --attach looks: without it there is nothing to wait for")
    plan = take_plan(options, ["n_nodes"])
    push_pull.run(options, plan)


@command.command("saturation")
@click.option("--curves", help="Some of size, ranks, nodes, partition, credit.  [default: all]", metavar="NAME[,NAME]")
@click.option("--sizes", help="Of the first curve.  [default: 4K:64M]", metavar="MIN:MAX|N,N")
@click.option("--compare", help="A peer in the curve over sizes: gloo.", metavar="NAME")
@cli_options.rounds("each point", default=5)
@cli_options.plot()
@cli_options.result(quick="The ends of each curve.")
@exit_on_error
def bench_saturation(**options: Any) -> None:
    """Goodput, latency, wire, CPU per GB and memory of push_pull over size, ranks, nodes, partitions, credit."""
    from .paper import saturation

    saturation.run(options)


@command.command("post")
@click.option("--nodes", "n_nodes", type=click.IntRange(1, 2), help="Nodes of the two ranks.  [default: 1, then 2]")
@click.option("--sizes", help="Bytes of a message.  [default: 8,4K,64K,1M,16M,64M]", metavar="N,N")
@cli_options.rounds("each contestant", default=5)
@cli_options.result(quick="Two sizes, one turn.")
@exit_on_error
def bench_post(**options: Any) -> None:
    """A message from rank to rank and back, beside gloo's send and recv."""
    from . import post

    post.run(options)


@command.command("optimum")
@click.option("--sets", help="Which cells: equal, full, unequal, models.  [default: all]", metavar="NAME[,NAME]")
@click.option("--workers", help="Workers with equal links.  [default: 2,4,8]", metavar="N[,N]")
@cli_options.rounds("each contestant", default=3)
@cli_options.result(quick="Fewer cells and turns.")
@exit_on_error
def bench_optimum(**options: Any) -> None:
    """Steps on real packets beside the model: n workers and k helpers, each a network namespace. Needs root."""
    from .paper import optimum

    optimum.run(options)


@command.command("schedule")
@click.option("--workers", "n_workers", type=_COUNT, help="Machines that train.  [default: 4]")
@click.option("--helpers", "n_helpers", type=click.IntRange(0), help="Machines that only sum.  [default: 2]")
@click.option("--model", help="A built-in model, its tensors N times smaller.  [default: vgg16/32]", metavar="NAME/N")
@click.option("--ratio", type=click.FloatRange(0, min_open=True),
              help="Seconds of computing for each of communication.  [default: 0.75]")
@click.option("--ways", help="fifo|priority, crossing|DDP gloo|...  [default: all]", metavar="NAME[|NAME]")
@cli_options.rounds("each way", default=3)
@cli_options.result(quick="Three ways, one turn.")
@exit_on_error
def bench_schedule(**options: Any) -> None:
    """Training by urgency and without a barrier against order of arrival, and against DDP over gloo. Needs root."""
    from . import schedule

    schedule.run(options)


@command.command("compressed")
@click.option("--machines", help="How many, each with one rank.  [default: 2,4]", metavar="N[,N]")
@click.option("--codecs", help="As of `bpsfast plan --compression`, between bars.  [default: six]",
              metavar="CODEC[|CODEC]")
@click.option("--model", help="A built-in model.  [default: resnet18]")
@click.option("--rate-mbit", type=click.FloatRange(1), help="Of each link, each way.  [default: 100]")
@click.option("--compute-s", type=click.FloatRange(0), help="Computing (slept) in a step.  [default: 0.1]")
@cli_options.rounds("each codec", default=3)
@cli_options.result(quick="Two codecs on two machines, one turn.")
@exit_on_error
def bench_compressed(**options: Any) -> None:
    """Training steps on slow links with each codec and without: times, and bytes by the kernel's count. Needs root."""
    from . import compressed

    compressed.run(options)


@command.command("accuracy")
@click.option("--codecs", help="As of `bpsfast plan --compression`, between bars.  [default: seven]",
              metavar="CODEC[|CODEC]")
@click.option("--seeds", "n_seeds", type=_COUNT, help="Trainings with each codec.  [default: 6]")
@click.option("--epochs", "n_epochs", type=_COUNT, help="Of each training.  [default: 40]")
@cli_options.result(quick="Fewer codecs and seeds.")
@exit_on_error
def bench_accuracy(**options: Any) -> None:
    """Accuracy that two machines reach with each codec and without. Needs scikit-learn."""
    from . import accuracy

    accuracy.run(options)


@command.command("ddp")
@click.option("-n", "-np", "--num-ranks", "n_ranks", type=_COUNT, help="Ranks, on this machine.  [default: 2]")
@click.option("--sizes", help="Of the collectives.  [default: 1K,16K,256K,4M,64M]", metavar="N[,N]")
@click.option("--operations", help="Which collectives, '' for none.  [default: all]", metavar="NAME[,NAME]")
@cli_options.rounds("each backend", default=5)
@cli_options.result(quick="Fewer sizes, one turn.")
@exit_on_error
def bench_ddp(**options: Any) -> None:
    """DistributedDataParallel and torch's collectives by the backend "bpsfast" beside gloo. Needs torch."""
    from . import ddp

    ddp.run(options)


@command.command("model")
@click.argument("model", metavar="NAME")
@click.option("--backend", metavar="NAME[,NAME]",
              help="Who averages gradients: bpsfast, gloo, nccl, horovod.  [default: bpsfast]")
@click.option("--size", type=click.Choice(["small", "full"]), default="small", show_default=True,
              help="Few layers, for CPUs; or the published parameters, for GPUs.")
@click.option("-n", "-np", "--num-ranks", "n_ranks", type=_COUNT, help="Ranks, on this machine.  [default: 2]")
@click.option("--batch", type=_COUNT, help="Samples of a rank in a step.  [default: the model's own]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda for full models]")
@click.option("--data", type=click.Path(), metavar="PATH",
              help="A real set: an .npz file, or a folder of images for each class.  [default: synthetic]")
@click.option("--steps", "n_steps", type=_COUNT, help="Steps of a turn.  [default: 10]")
@cli_options.rounds("each backend", default=3)
@cli_options.result(quick="Two steps, one turn.")
@exit_on_error
def bench_model(**options: Any) -> None:
    """Train resnet50, vgg16, transformer, bert-large, gpt2 or ugatit: images/s or tokens/s of one rank and of all.

    Exit code 1 if ranks end with different weights.
    """
    from . import training

    if not training.weights_agree(training.run(options)):
        raise SystemExit(1)


@command.command("device")
@click.option("--device", type=click.Choice(["cuda", "host"]), default="cuda", show_default=True,
              help="A GPU, or the machine itself as one: that shows that all of it runs, and claims nothing.")
@click.option("-n", "-np", "--num-ranks", "n_ranks", type=_COUNT, help="Ranks that share the device.  [default: 2]")
@click.option("--sizes", help="Of the arrays.  [default: 1M,4M,16M,64M,256M]", metavar="N[,N]")
@click.option("--parts", help="Some of sums, beside, stages, training, memory.  [default: all]", metavar="NAME[,NAME]")
@set_option
@cli_options.rounds("each operation", default=5)
@cli_options.result(quick="Fewer sizes, two turns.")
@exit_on_error
def bench_device(assignments: tuple[str, ...], **options: Any) -> None:
    """push_pull by ranks that share a GPU beside plain copies, a stream that is not held up, overlap, bits, memory."""
    from . import device

    if not device.run({**options, "settings": overrides(assignments)}):
        raise SystemExit(1)


@command.command("frameworks")
@click.option("-n", "-np", "--num-ranks", "n_ranks", type=_COUNT, help="Ranks, on this machine.  [default: 2]")
@cli_options.rounds("each row", default=10)
@cli_options.result(quick="One turn.")
@exit_on_error
def bench_frameworks(**options: Any) -> None:
    """Frameworks' arrays beside NumPy's: one large tensor and 161 small ones. Of the frameworks that are installed."""
    from . import frameworks

    frameworks.run(options)


@command.command("rows")
@click.option("--table", "table_size", help="Size of the table.  [default: 2G]", metavar="SIZE")
@click.option("--row", "row_elements", type=_COUNT, help="float32 elements of a row.  [default: 128]")
@click.option("--share", type=click.FloatRange(0, 1, min_open=True),
              help="Share of the rows that a rank pushes in a step.  [default: 0.01]")
@cli_options.rounds("either", default=5)
@cli_options.result(quick="A small table, two turns.")
@exit_on_error
def bench_rows(**options: Any) -> None:
    """Bytes and time of a push of few rows of a large table, between two machines, beside those of a dense array."""
    from . import rows

    rows.run(options)


@command.command("autotune")
@click.option("--starts", help="Bad partition_bytes to begin with.  [default: 64000,65536000]", metavar="N[,N]")
@cli_options.rounds("what was chosen and the grid's best", default=3)
@cli_options.result()
@exit_on_error
def bench_autotune(**options: Any) -> None:
    """Tuning inside training, from bad settings, beside a grid of settings. Needs root and torch; ten minutes."""
    from . import autotune

    autotune.run(options)


@command.command("neighbour")
@click.option("--cores", type=_COUNT, help="Cores of the helper.  [default: 1]")
@click.option("--nic-rate", type=click.FloatRange(0, min_open=True), metavar="GBPS",
              help="What it sends, and receives, at most, Gbit/s.  [default: 0.2]")
@click.option("--loads", metavar="SHARE[,SHARE]",
              help="Share of the time in which the other job wants its cores.  [default: 0.5,1]")
@click.option("--windows", "n_windows", type=_COUNT, help="Windows of each kind.  [default: 20]")
@click.option("--at-most-s", type=click.FloatRange(0, min_open=True),
              help="Give up by then where other programs disturb.  [default: 600 for each load]")
@click.option("--window-s", type=click.FloatRange(0, min_open=True), help="Length of a window.  [default: 1]")
@cli_options.result(quick="Fewer windows.")
@exit_on_error
def bench_neighbour(**options: Any) -> None:
    """Step time of another job on this machine while a helper with a quota serves, and while it is idle."""
    from . import neighbour

    neighbour.run(options)


@command.command("chaos")
@click.option("--seeds", type=_COUNT, default=20, show_default=True, help="Trials, each a job of its own.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first one's seed.")
@cli_options.load()
@cli_options.result()
@exit_on_error
def bench_chaos(**options: Any) -> None:
    """Kill and stop processes of training jobs: every sum stays right, or the job ends in words, and never hangs."""
    from . import chaos

    if not chaos.run(options):
        raise SystemExit(1)


@command.command("soak")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True)
@click.option("--transport", type=click.Choice(["auto", "tcp", "shm"]), default="tcp", show_default=True)
@cli_options.load()
@cli_options.result()
@exit_on_error
def bench_soak(**options: Any) -> None:
    """A job that trains for long: every sum is right, and memory, descriptors and threads of no process grow."""
    from . import soak

    if not soak.run(options):
        raise SystemExit(1)


@command.command("helpers")
@click.option("--steps", type=click.IntRange(40), default=400, show_default=True)
@click.option("--size-mb", type=click.FloatRange(0.1), default=24.0, show_default=True, help="Gradients of one step.")
@click.option("--placement", type=click.Choice(["optimal", "ps"]), default="ps", show_default=True)
@cli_options.result()
@exit_on_error
def bench_helpers(**options: Any) -> None:
    """A training with 4, then 2, then 4 helpers: its parameters, bit by bit, and its pauses."""
    from . import helpers

    if not helpers.run(options):
        raise SystemExit(1)


@command.command("ladder")
@click.argument("peer", required=False, metavar="[HOST]")
@click.option("--listen", is_flag=False, flag_value="", metavar="[ADDRESS]",
              help="Be the service: wait here for one run of `bench ladder` on the other host.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the control connection.  [default: 7810]")
@click.option("--devices", metavar="A[,B]", help="RDMA device of this end; with both ends here, of the service, too.")
@click.option("--models", metavar="NAME[/N],...", help="vgg19, resnet50, inception-bn; /N: 1/N of every tensor.")
@cli_options.rounds("each rung", default=5)
@cli_options.result(quick="One round, small fractions of the lists.")
@exit_on_error
def bench_ladder(**options: Any) -> None:
    """What each thing costs that RDMA can be made to do wrong, and whether tcp were better.

    On one host `bpsfast bench ladder --listen`, on the other `bpsfast bench ladder HOST`; without either, both ends
    are here. The control connection is not authenticated. Exit code 3 without an RDMA device.
    """
    from .paper import ladder

    ladder.run(options)
