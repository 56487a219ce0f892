"""The demo: train the same network in one process and as a bpsfast job, compare, and draw.

    make demo            or: python examples/digits/demo.py

Four ranks on two nodes with one helper, tcp between the nodes: in network namespaces if this is root, so that bytes
cross real interfaces, else over loopback. Writes ``loss.png``, ``trace.json`` and ``summary.json``; ends with 1 if the
comparison fails.
"""
from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from progress import Progress

from bpsfast import trace
from bpsfast.launch.namespaces import netns

RANKS, NODES, HELPERS = 4, 2, 1
TIMEOUT_S = 600
WIRE_TOLERANCE = 0.03
MIN_ACCURACY = 0.97
_HERE = Path(__file__).parent
_STEP = re.compile(r"^\[rank 0\] step (\d+)/(\d+)$")


def train_single(out: Path, epochs: int) -> None:
    """Train in one process."""
    subprocess.run([sys.executable, str(_HERE / "single.py"), "--ranks", str(RANKS), "--nodes", str(NODES),
                    "--epochs", str(epochs), "--out", str(out)], check=True, timeout=TIMEOUT_S)


def train_job(out: Path, epochs: int, loopback: bool) -> None:
    """Train as a job, with a progress bar; raises `CalledProcessError` if the job fails."""
    lacking = "asked for" if loopback else netns.missing()
    if lacking is not None:
        print(f"loopback instead of network namespaces: {lacking}")
    command = [
        str(Path(sys.executable).with_name("bpsfast")), "run", "-n", str(RANKS), "--nodes", str(NODES),
        "--helpers", str(HELPERS), *(["--netns"] if lacking is None else []), "--timeout", str(TIMEOUT_S),
        "--set", "transport=tcp", "--set", "partition_bytes=1048576", "--set", f"trace_dir={out / 'trace'}", "--",
        sys.executable, str(_HERE / "train.py"), "--epochs", str(epochs), "--out", str(out), "--show-steps",
    ]
    print("$", " ".join(command), flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job, Progress("training") as progress:
        assert job.stdout is not None
        for line in job.stdout:
            step = _STEP.match(line.rstrip())
            if step:
                progress.show(int(step[1]), int(step[2]))
            else:
                progress.print(line.rstrip())
    if job.returncode:
        raise subprocess.CalledProcessError(job.returncode, command)


def summed(folder: Path, window_ns: tuple[int, int]) -> dict[str, int]:
    """Return the bytes that each node has summed in the time of training, from the nodes' traces."""
    found: dict[str, int] = {}
    for path in sorted(folder.glob("node-*.trace.json")):
        node = trace.read(path)
        name = f"node{node.node}" if node.node < NODES else f"helper{node.node - NODES}"
        found[name] = sum(span.args["nbytes"] for span in node.spans
                          if span.kind == "sum" and window_ns[0] <= span.begin_ns <= window_ns[1])
    return dict(sorted(found.items(), key=lambda item: (item[0].startswith("helper"), item[0])))


def difference(single: Path, job: Path) -> float:
    """Return the largest difference between two trainings' parameters; NaN if a parameter is missing or not finite."""
    with np.load(single) as a, np.load(job) as b:
        names = {name for name in [*a.files, *b.files] if name.startswith("parameter.")}
        if not names <= set(a.files) & set(b.files):
            return float("nan")
        return float(np.max([np.abs(a[name].astype(np.float64) - b[name]).max() for name in names]))


def summarise(out: Path) -> dict:
    """Return what `summary.json` says."""
    job = json.loads((out / "job.json").read_text())

    def both_ways(counts: dict) -> dict[str, int]:
        return {name: count["sent"] + count["received"] for name, count in counts.items()}

    measured, expected = both_ways(job["wire"]), both_ways(job["wire_predicted"])
    return {
        "test_accuracy": job["test_accuracy"],
        "max_param_diff_vs_single_process": difference(out / "single.npz", out / "job.npz"),
        "ranks": RANKS, "nodes": NODES, "helpers": HELPERS, "steps": job["steps"], "ranks_agree": job["ranks_agree"],
        "transports": job["transports"],
        "bytes_on_wire_source": job["wire_source"],
        "bytes_on_wire": measured,
        "bytes_on_wire_predicted": expected,
        "bytes_on_wire_ring": both_ways(job["wire_ring"]),
        "bytes_on_wire_deviation": max(abs(measured[name] / expected[name] - 1) for name in expected),
        "bytes_on_wire_by_direction": job["wire"],
        "bytes_summed": summed(out / "trace", tuple(job["window_ns"])),
        "seconds_by_role": trace.durations(out / "trace"),
    }


def failures(summary: dict) -> list[str]:
    """Return what is not as promised."""
    accuracy, summed_bytes = summary["test_accuracy"], summary["bytes_summed"]
    promises = {
        f"test accuracy {accuracy:.4f} is at least {MIN_ACCURACY}": accuracy >= MIN_ACCURACY,
        "parameters equal those of one process": summary["max_param_diff_vs_single_process"] == 0.0,
        "all ranks have the same parameters": summary["ranks_agree"],
        f"bytes on the wire are within {WIRE_TOLERANCE:.0%} of the prediction":
            summary["bytes_on_wire_deviation"] <= WIRE_TOLERANCE,
        "every node and helper summed": len(summed_bytes) == NODES + HELPERS and all(summed_bytes.values()),
    }
    for promise, kept in promises.items():
        print(f"  {'yes' if kept else 'NO '}  {promise}")
    return [promise for promise, kept in promises.items() if not kept]


def draw(out: Path) -> None:
    """Draw the loss curves of both trainings."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    with np.load(out / "single.npz") as single, np.load(out / "job.npz") as job:
        axes.plot(single["losses"], label="one process", linewidth=4, color="0.75")
        axes.plot(job["losses"], label=f"bpsfast: {RANKS} ranks, {NODES} nodes, {HELPERS} helper", linewidth=1)
    axes.set(xlabel="step", ylabel="training loss (mean of the ranks)", yscale="log", title="Handwritten digits")
    axes.legend()
    figure.savefig(out / "loss.png", dpi=120)


def main() -> int:
    """Run everything; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--loopback", action="store_true", help="no network namespaces, even if this is root")
    options = parser.parse_args()
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    train_single(out, options.epochs)
    train_job(out, options.epochs, options.loopback)
    summary = summarise(out)
    n_events = trace.merge(out / "trace", out / "trace.json")
    draw(out)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    shown = ("bytes_on_wire", "bytes_on_wire_predicted", "bytes_on_wire_ring", "bytes_summed")
    for name in shown:
        print(f"{name:24}", "  ".join(f"{machine} {nbytes / 1e6:.1f} MB" for machine, nbytes in summary[name].items()))
    print(f"wrote {out}/loss.png, trace.json ({n_events} events; open it in ui.perfetto.dev), summary.json")
    return 1 if failures(summary) else 0


if __name__ == "__main__":
    raise SystemExit(main())
