"""The report of `bench worker_loss`: pauses at a loss by kind, and the time that a loss costs, beside torchft's."""
from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bpsfast.bench.harness import table

from .torchft_trial import LIGHTHOUSES
from .training import N_RANKS, PHASES
from .trial import LEASE_S, N_AROUND, Kind, Trial

#: The sections of the result file.
PAUSE, BESIDE, TRIAL = "pause", "time lost", "trial"
#: Our kinds of trials that are compared with torchft's, whose replica is a single process.
OURS = tuple(Kind("four machines", lost).name for lost in ("rank", "machine"))
_N_DRAWS = 2000
_N_LEFT = N_RANKS - 1


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest of *values* that *percent* of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def pauses(trials: Sequence[Trial]) -> dict[str, dict[str, list[float]]]:
    """Return for each kind of our *trials*, without bad ones, the values of all remaining ranks, in seconds.

    `pause_s` of silent machines is without the lease, which `reported_s` (`Loss.pause_s`) does not include.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for trial in trials:
        if trial.trouble or trial.contestant in LIGHTHOUSES:
            continue
        lease_s = LEASE_S if trial.lost == "silent machine" else 0.0
        of = found.setdefault(trial.contestant, {name: [] for name in ("pause_s", "reported_s", "calm_s", "median_s",
                                                                       "longest_s")})
        of["pause_s"] += [each.pause_s - lease_s for each in trial.around]
        of["reported_s"] += trial.reported_s
        for name in ("calm_s", "median_s", "longest_s"):
            of[name] += [getattr(each, name) for each in trial.around]
    return found


def beside(trials: Sequence[Trial]) -> dict[str, dict[int, Trial]]:
    """Return by contestant, ours first, the good trials of the schedules that torchft had, too, by index."""
    indices = {trial.index for trial in trials if trial.contestant in LIGHTHOUSES}
    found: dict[str, dict[int, Trial]] = {name: {} for name in (*OURS, *LIGHTHOUSES)} if indices else {}
    for trial in trials:
        if trial.index in indices and trial.contestant in found and not trial.trouble:
            found[trial.contestant][trial.index] = trial
    return found


def times_ours(ours: dict[int, Trial], theirs: dict[int, Trial]) -> tuple[float, float, float] | None:
    """Return the ratio of the medians of the time lost, theirs by ours, and its 95 % interval by resampling schedules.

    It is None if there is no common schedule, or if the interval of our median includes 0.
    """
    common = sorted(ours.keys() & theirs.keys())
    pairs = [tuple(statistics.median(each.lost_s for each in of[i].around) for of in (ours, theirs)) for i in common]
    draw, drawn = random.Random(len(pairs)), []
    for _ in range(_N_DRAWS if pairs else 0):
        mine, other = (statistics.median(column) for column in zip(*draw.choices(pairs, k=len(pairs))))
        if mine <= 0:
            return None
        drawn.append(other / mine)
    if not drawn:
        return None
    drawn.sort()
    mine, other = (statistics.median(column) for column in zip(*pairs))
    return other / mine, drawn[int(0.025 * _N_DRAWS)], drawn[int(0.975 * _N_DRAWS)]


def text(trials: Sequence[Trial]) -> str:
    """Return the tables."""
    of_pauses, of_losses = _pauses_text(trials), _beside_text(trials)
    return "\n\n".join(each for each in (of_pauses, of_losses) if each)


def records(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return the rows of the result file: of each kind, of each contestant beside torchft, and every trial."""
    found: list[dict[str, Any]] = []
    for name, values in pauses(trials).items():
        found.append({"section": PAUSE, "chosen": {"lost": name, "n_per_round": _N_LEFT},
                      "measured": {"samples_s": values["longest_s"], **values, **_percentiles(values["pause_s"])}})
    of = beside(trials)
    for name, those in of.items():
        if those:
            around = [each for trial in those.values() for each in trial.around]
            lost_s = [each.lost_s for each in around]
            found.append({"section": BESIDE, "chosen": {"contestant": name, "n_steps": N_AROUND,
                                                        "n_per_round": _N_LEFT},
                          "measured": {"samples_s": [each.around_s for each in around], "lost_s": lost_s,
                                       "n_trials": len(those), **_percentiles(lost_s),
                                       "times_ours": {ours: times_ours(of[ours], those) for ours in OURS}}})
    return found + [{"section": TRIAL, "chosen": {"contestant": trial.contestant, "index": trial.index},
                     "measured": asdict(trial)} for trial in trials]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}_s": percentile(values, percent) for percent in (50, 99, 100)}


def _shown_ms(values: Sequence[float], *percents: float) -> list[str]:
    return [f"{1e3 * percentile(values, percent):.1f}" if values else "-" for percent in percents]


def _pauses_text(trials: Sequence[Trial]) -> str:
    lines = [["lost", "trials", "bad", "step ms", "pause p50", "p99", "max", "reported p50", "p99", "max",
              "before p50", "p99"]]
    ours = [trial for trial in trials if trial.contestant not in LIGHTHOUSES]
    found = pauses(trials)
    for name in dict.fromkeys(trial.contestant for trial in ours):
        those = [trial for trial in ours if trial.contestant == name]
        values = found.get(name, {})

        def shown(field: str, *percents: float, values: dict[str, list[float]] = values) -> list[str]:
            return _shown_ms(values.get(field, []), *percents)

        lines.append([name, str(len(those)), str(sum(bool(trial.trouble) for trial in those)), *shown("median_s", 50),
                      *shown("pause_s", 50, 99, 100), *shown("reported_s", 50, 99, 100), *shown("calm_s", 50, 99)])
    phases = Counter(trial.phase for trial in ours if trial.phase)
    when = ", ".join(f"{phase} {phases[phase]}" for phase in PHASES if phases[phase])
    return (f"# Pauses of the remaining ranks at a loss, ms; of silent machines without the lease of {LEASE_S:g} s.\n"
            "# pause: the longest step - the median one; reported: Loss.pause_s; before: as pause, before the loss.\n"
            f"# What the lost ranks did at that moment: {when}\n{table.plain(lines)}") if ours else ""


def _beside_text(trials: Sequence[Trial]) -> str:
    found, indices = beside(trials), {trial.index for trial in trials if trial.contestant in LIGHTHOUSES}
    if not found:
        return ""
    lines = [["contestant", "trials", "survived", "step ms", "lost p50", "p99", "max", "pause p50",
              *(word for name in OURS for word in (f"by {name.rpartition(', ')[2]}", "95 %"))]]
    for name, those in found.items():
        around = [each for trial in those.values() for each in trial.around]
        n_trials = sum(trial.contestant == name and trial.index in indices for trial in trials)
        lines.append([name, str(n_trials), str(len(those)), *_shown_ms([each.median_s for each in around], 50),
                      *_shown_ms([each.lost_s for each in around], 50, 99, 100),
                      *_shown_ms([each.pause_s for each in around], 50)])
        for ours in OURS:
            ratio = times_ours(found[ours], those)
            lines[-1] += [f"{ratio[0]:.3g}", f"{ratio[1]:.3g} to {ratio[2]:.3g}"] if ratio else ["-", "-"]
    settings = "\n# ".join(f"{name}: {', '.join(f'{key} = {value}' for key, value in options.items())}"
                           for name, options in LIGHTHOUSES.items())
    return (f"# Four ranks over tcp, one is killed and not started again: what {N_AROUND} steps around it take longer, "
            "ms.\n# by rank, by machine: the median divided by ours where the rank was killed, or its node as well.\n"
            f"# {settings}\n{table.plain(lines)}")
