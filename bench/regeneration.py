"""``make results``: measures every figure and plot of README, DESIGN and bench/README again.

Each piece is a command that can also be run alone; all write into ``bench/results``. ``make results ARGS=--list`` shows
files, times and requirements. Pieces run one after another, because they share two cores. A piece that cannot run here
(without root, a GPU, RDMA devices or a package) is reported, and its files stay unchanged. If a piece fails, it is
reported and the others continue. At the end the READMEs' numbers are replaced by those of the files.
"""
from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import click

from bpsfast.base import exit_codes
from bpsfast.bench import claims
from bpsfast.bench.harness.option_lists import parse_names
from bpsfast.bench.paper import expr1
from bpsfast.launch.namespaces import netns

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("bench/results")


def _nothing() -> str | None:
    return None


def _package(*names: str) -> Callable[[], str | None]:
    def lacking() -> str | None:
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        return f"{', '.join(missing)} not installed" if missing else None

    return lacking


def _machines() -> str | None:
    return netns.missing() or _package("torch")()


def _machines_and_plots() -> str | None:
    return _machines() or _package("scipy", "matplotlib")()


def _guest() -> str | None:
    return None if shutil.which("qemu-system-x86_64") else "no qemu-system-x86_64 (make guest installs it)"


def _mpi() -> str | None:
    return _package("torch", "mpi4py")() or (None if shutil.which("mpirun") else "no mpirun (make mpi installs it)")


def _gpu() -> str | None:
    return None if shutil.which("nvidia-smi") else "no GPU (no nvidia-smi)"


class Piece(NamedTuple):
    """One command: patterns of the files it writes into `RESULTS`, minutes on two cores, and why it cannot run here.

    `command` begins with "bpsfast", "python" or "make", which are those of this environment.
    """

    name: str
    command: str
    files: tuple[str, ...]
    minutes: float
    lacking: Callable[[], str | None] = _nothing


def _bench(command: str, file: str, minutes: float, lacking: Callable[[], str | None] = _nothing) -> Piece:
    return Piece(file.partition(".")[0], f"bpsfast bench {command} --json {RESULTS / file}", (file,), minutes, lacking)


def _in_guest(program: str, file: str, minutes: float) -> Piece:
    """Return a piece that runs *program*, a shell command, in the guest, where it writes ``$OUT/file``."""
    command = f"python -m tests.guest run --out {RESULTS} --timeout 1800 -- sh -c {shlex.quote(program)}"
    return Piece(file.partition(".")[0], command, (file,), minutes, _guest)


#: In the order in which they run: those that use the network least come first; expr2 and breakdown need expr3.
PIECES = (
    _bench("kernels", "kernels.json", 11),
    _bench("codecs", "codecs.jsonl", 4),
    _bench("post", "post.jsonl", 1),
    _bench("push_pull --compare gloo,mpi,mpich,impi", "push_pull_one_machine.jsonl", 25, _mpi),
    _bench("push_pull --nodes 2 --compare gloo --sizes 4K,64K,1M,64M", "push_pull_two_nodes.jsonl", 4, _machines),
    _bench("overhead", "overhead.jsonl", 2, _package("torch")),
    _bench("ddp --rounds 9", "ddp.jsonl", 2, _package("torch")),
    _bench("scale", "scale.jsonl", 4),
    _bench("rows", "rows.jsonl", 1),
    _bench("frameworks --rounds 40", "frameworks.jsonl", 1, _package("jax", "tensorflow")),
    _bench("accuracy", "accuracy.jsonl", 2, _package("sklearn")),
    _bench("neighbour", "neighbour.jsonl", 4),
    _bench("compressed", "compressed.jsonl", 6, _machines),
    _bench("autotune", "autotune.jsonl", 4, _machines),
    _bench("helpers", "helpers.jsonl", 3),
    _bench("worker_loss", "worker_loss.jsonl", 45),
    _bench("schedule --rounds 2", "schedule.jsonl", 20, _machines),
    Piece("expr3", "make expr3", ("expr3.json", "expr3.md", "expr3.png"), 3, _package("scipy", "matplotlib")),
    Piece("expr2", "make expr2", ("expr2.json", "expr2.md", "expr2.png"), 1, _package("scipy", "matplotlib")),
    Piece("expr1", "make expr1", (*(f"optimum_{name}.jsonl" for name in expr1.PIECES), "expr1.md", "expr1.png"), 90,
          _machines_and_plots),
    Piece("breakdown", "make breakdown", ("breakdown.jsonl", "breakdown.md", "breakdown.png"), 11,
          _machines_and_plots),
    Piece("plots", "python -m bpsfast.bench.drawn", ("push_pull_one_machine.png", "schedule.png", "helpers.png"), 1,
          _package("matplotlib")),
    _in_guest("on 0 bpsfast bench ladder --listen --devices rxe0 & on 1 bpsfast bench ladder 10.9.1.1 --devices rxe1 "
              "--models vgg19/32,resnet50/8,inception-bn/4 --rounds 5 --json $OUT/ladder.jsonl && wait",
              "ladder.jsonl", 3),
    _in_guest("python -m bpsfast.bench.rdma_perf --json $OUT/rdma_perf.json", "rdma_perf.json", 4),
    _in_guest("python -m bpsfast.bench.rdma_push_pull --json $OUT/rdma_push_pull.json", "rdma_push_pull.json", 3),
    Piece("gpu", "make gpu", ("device_*.jsonl",), 8, _gpu),
)


class Outcome(NamedTuple):
    """Result of a piece: "written", or why not; `written`: its files that are newer than its start."""

    piece: Piece
    state: str
    took_s: float = 0.0
    written: tuple[str, ...] = ()

    @property
    def is_failed(self) -> bool:
        """Return whether the piece could run and failed."""
        return self.state.startswith("FAILED")


def regenerate(piece: Piece, folder: Path = ROOT) -> Outcome:
    """Run one piece in *folder*, the root of the project; it prints to this process's output."""
    lacking = piece.lacking()
    if lacking is not None:
        return Outcome(piece, f"not here: {lacking}")
    began, unix_ns = time.monotonic(), time.time_ns()
    ended = subprocess.run(shlex.split(piece.command), cwd=folder, env=_environ(), check=False).returncode
    took_s = time.monotonic() - began
    written = [path.name for pattern in piece.files for path in sorted((folder / RESULTS).glob(pattern))
               if path.stat().st_mtime_ns >= unix_ns]
    unwritten = [pattern for pattern in piece.files if not any(fnmatch(name, pattern) for name in written)]
    if ended:
        state = f"FAILED: it ended with {ended}; its output says why"
    elif unwritten:
        state = f"FAILED: it did not write {', '.join(unwritten)}"
    else:
        state = "written"
    return Outcome(piece, state, took_s, tuple(written))


def _environ() -> dict[str, str]:
    """Return this process's environment, with its own bpsfast and python first in PATH."""
    return {**os.environ, "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))}


def listing(pieces: Sequence[Piece]) -> str:
    """Return a table of the pieces: files, minutes, and what is missing here."""
    lines, able = [], []
    for piece in pieces:
        lacking = piece.lacking()
        if lacking is None:
            able.append(piece.minutes)
        lines += [f"{piece.name}: {piece.minutes:g} minutes" + (f"; not here: {lacking}" if lacking else ""),
                  f"    {piece.command}", f"    -> {' '.join(piece.files)}"]
    return "\n".join([*lines, f"{len(able)} of {len(pieces)} can run here, in {sum(able):g} minutes"])


@click.command()
@click.option("--only", metavar="NAME[,NAME]", help="These pieces.")
@click.option("--without", metavar="NAME[,NAME]", help="Not these pieces.")
@click.option("--list", "only_list", is_flag=True, help="Files, minutes and needs of each piece; nothing is measured.")
@exit_codes.exit_on_error
def main(only: str | None, without: str | None, only_list: bool) -> None:
    """Measure all results again, which takes hours. Exit code 1 if a piece failed."""
    known = [piece.name for piece in PIECES]
    wanted = known if only is None else parse_names("--only", only, known)
    left_out = () if without is None else parse_names("--without", without, known)
    chosen = [piece for piece in PIECES if piece.name in wanted and piece.name not in left_out]
    if only_list:
        click.echo(listing(chosen))
        return
    outcomes = []
    for piece in chosen:
        click.echo(f"== {piece.name}: {piece.command}")
        outcomes.append(regenerate(piece))
    click.echo("\n".join(f"{each.piece.name}: {each.state}" + (f" {' '.join(each.written)} in {each.took_s / 60:.1f} "
                                                               "minutes" if each.written else "") for each in outcomes))
    if any(each.written for each in outcomes):
        for page, difference in claims.renew():
            click.echo(f"{page}, to be read again: {difference}")
    if any(each.is_failed for each in outcomes):
        sys.exit(exit_codes.FAILED)


if __name__ == "__main__":
    main()
