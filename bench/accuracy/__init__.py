"""``bpsfast bench accuracy``: whether compressed training reaches the accuracy of uncompressed training.

Two machines (processes over loopback, tcp) with a rank each train a small network on real data, from several seeds,
uncompressed and with each codec. Trainings of one seed have the same weights and batches, so any difference comes from
the codec. `task` has the data and the network, `program` is one rank.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any

from bpsfast.bench.harness import job_output, table
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.orchestration.errors import LackingError, PeerLostError
from bpsfast.tools.planner.prediction import parse

CODECS = ("topk:k=0.01,error_feedback", "randomk:k=0.01,error_feedback", "onebit:error_feedback",
          "dithering:k=4,error_feedback", "int8:error_feedback", "float16:error_feedback", "bfloat16:error_feedback")
_QUICK = CODECS[:1]
UNCOMPRESSED = "uncompressed"
#: Points of accuracy that a codec with error feedback may lose at most.
PROMISED_POINTS = 0.5
_TIMEOUT_S = 3600.0


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train as *options* say, print a table, and return (and write) the records.

    *options*, each of which may be missing or None: codecs (separated by "|", as `bpsfast plan --compression` takes
    them), n_seeds (6), n_epochs (40), json_path, quick. Raises `LackingError` if scikit-learn is missing, and
    `PeerLostError` or `StallError` if training fails or does not end.
    """
    given = BenchRun("accuracy", options)
    codecs = given["codecs"].split("|") if "codecs" in given else list(_QUICK if given.quick else CODECS)
    for text in codecs:
        parse(text)
    try:
        import sklearn.datasets  # noqa: F401
    except ImportError:
        raise LackingError("bench accuracy needs scikit-learn, whose digits are learned: pip install scikit-learn"
                           ) from None
    n_seeds, n_epochs = (given.get("n_seeds") or (2 if given.quick else 6),
                         given.get("n_epochs") or (20 if given.quick else 40))
    found = train(["", *codecs], n_seeds, n_epochs)
    print(report(found), flush=True)
    return given.finish(records(found))


def train(codecs: list[str], n_seeds: int, n_epochs: int) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each codec, one for each seed: accuracy, a digest of the weights, bytes sent."""
    command = [sys.executable, "-m", "bpsfast", "run", "-n", "2", "--nodes", "2", "--set", "transport=tcp",
               "--set", "min_compress_bytes=1024", "--", sys.executable, "-m", "bpsfast.bench.accuracy.program",
               json.dumps({"codecs": codecs, "n_seeds": n_seeds, "n_epochs": n_epochs})]
    first, second = (each["runs"] for each in job_output.run(command, f"training with {codecs}", 2, _TIMEOUT_S))
    if [each["weights"] for each in first] != [each["weights"] for each in second]:
        raise PeerLostError("the two ranks' weights differ after training")
    found: dict[str, list[dict[str, Any]]] = {}
    for each in first:
        found.setdefault(each["codec"] or UNCOMPRESSED, []).append(each)
    return found


def points(found: Mapping[str, list[dict[str, Any]]], codec: str) -> list[float]:
    """Return for each seed how many points more than uncompressed training *codec* reaches."""
    return [100 * (ours["accuracy"] - plain["accuracy"]) for ours, plain in zip(found[codec], found[UNCOMPRESSED])]


def report(found: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return the table: accuracies in percent, their mean and those of each seed."""
    plain_nbytes = mean(each["sent_nbytes"] for each in found[UNCOMPRESSED])
    lines = [["codec", "accuracy %", "points", "+-", "sent", "by seed", ""]]
    for codec, runs in found.items():
        gained = points(found, codec)
        error = stdev(gained) / len(gained) ** 0.5 if len(gained) > 1 else float("nan")
        sent = mean(each["sent_nbytes"] for each in runs)
        is_broken = parse(codec).error_feedback and mean(gained) < -PROMISED_POINTS if codec != UNCOMPRESSED else False
        lines.append([codec, f"{100 * mean(each['accuracy'] for each in runs):.2f}", f"{mean(gained):+.2f}",
                      f"{error:.2f}", f"1/{plain_nbytes / sent:.1f}",
                      " ".join(f"{100 * each['accuracy']:.1f}" for each in runs), "NOT KEPT" if is_broken else ""])
    return (f"# handwritten digits on two machines; promised with error feedback: at most {PROMISED_POINTS:g} points "
            f"less than uncompressed\n{table.plain(lines)}")


def records(found: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one record for each codec for the result file."""
    return [{"section": "digits", "chosen": {"codec": codec, "n_seeds": len(runs)},
             "measured": {"accuracy": [each["accuracy"] for each in runs], "points": points(found, codec),
                          "mean_accuracy": mean(each["accuracy"] for each in runs),
                          "mean_points": mean(points(found, codec)),
                          "sent_nbytes": [each["sent_nbytes"] for each in runs]}} for codec, runs in found.items()]
