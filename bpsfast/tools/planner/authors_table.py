"""The table of models in talks of BytePS's authors, recomputed; contradictory cells are marked.

The printed figures (HPC Interconnects Forum 2020, OSDI'20 section 4) stand beside those of the gradient lists: ideal
communication is all bytes once at 100 Gbit/s. The published training recipes give the bytes that a worker pushes and
pulls until convergence; the authors' own figures of that were not available.
"""
from __future__ import annotations

from typing import Any, NamedTuple

from ...base import output
from ...orchestration.placement.partition import ITEM_NBYTES
from . import catalog

_GBPS = 100.0
#: Relative difference between implementations that is no contradiction: heads, biases, vocabularies.
_SAME_MODEL = 0.02

_HEAD = ("model", "dtype", "parameters", "printed", "ideal", "printed", "batch", "forward", "backward", "steps", "TB")


class PrintedRow(NamedTuple):
    """Printed figures: millions of parameters (None: not printed), ideal ms; steps of the published recipe."""

    millions: int | None
    ideal_ms: float
    n_steps: int
    recipe: str


PRINTED = {
    "resnet50": PrintedRow(26, 8.32, 450_410, "90 epochs of 1,281,167 images, batch 256 (arXiv:1706.02677)"),
    "vgg16": PrintedRow(138, 44.6, 370_000, "370,000 iterations of batch 256 (arXiv:1409.1556)"),
    "transformer": PrintedRow(None, 19.5, 100_000, "100,000 steps (arXiv:1706.03762)"),
    "bert-base": PrintedRow(None, 23.7, 1_000_000, "1,000,000 steps of batch 256 (arXiv:1810.04805)"),
    "bert-large": PrintedRow(387, 61.9, 1_000_000, "1,000,000 steps of batch 256 (arXiv:1810.04805)"),
}


class Line(NamedTuple):
    """One model: counted and printed figures, and contradictions by cell."""

    name: str
    model: catalog.Model
    compute: catalog.Compute
    printed: PrintedRow
    ideal_ms: float
    shuffled_tb: float
    parameters_contradicted: str
    ideal_contradicted: str

    @property
    def contradictions(self) -> list[str]:
        """Why printed cells cannot be right."""
        return [why for why in (self.parameters_contradicted, self.ideal_contradicted) if why]


def lines() -> list[Line]:
    """Return the lines of the table, one per model."""
    found = []
    for name, printed in PRINTED.items():
        model = catalog.load(name)
        assert model.compute is not None
        found.append(Line(
            name, model, model.compute, printed, _ideal_ms(model.n_parameters, model.dtype),
            2 * model.nbytes * printed.n_steps / 1e12, _parameters(printed, model.n_parameters),
            _ideal(printed, model.dtype, model.n_parameters)))
    return found


def text() -> str:
    """Return the table as text; ``!`` marks a contradicted cell, explained below."""
    found = lines()
    return "\n".join([
        output.columns(rows(found), right=range(2, len(_HEAD))), "",
        f"ideal: all gradients once through {_GBPS:g} Gbit/s. printed: by BytePS's authors, as are the compute times "
        "(one V100).",
        "TB: pushed and pulled by one worker until convergence, with the steps of the published recipe.",
        *(f"! {line.model.title}: {why}" for line in found for why in line.contradictions)])


def rows(found: list[Line]) -> list[tuple[str, ...]]:
    """Return the cells, head first."""
    return [_HEAD, *((
        line.model.title, line.model.dtype, f"{line.model.n_parameters / 1e6:.1f}M",
        "-" if line.printed.millions is None else _marked(f"{line.printed.millions}M", line.parameters_contradicted),
        f"{line.ideal_ms:.2f} ms", _marked(f"{line.printed.ideal_ms:g} ms", line.ideal_contradicted),
        str(line.compute.batch), f"{line.compute.forward_s * 1e3:.0f} ms", f"{line.compute.backward_s * 1e3:.0f} ms",
        f"{line.printed.n_steps:,}", f"{line.shuffled_tb:.0f}") for line in found)]


def data() -> list[dict[str, Any]]:
    """Return the JSON data."""
    return [{
        "model": line.name, "dtype": line.model.dtype, "n_parameters": line.model.n_parameters,
        "printed_n_parameters": None if line.printed.millions is None else line.printed.millions * 1_000_000,
        "ideal_s": line.ideal_ms / 1e3, "printed_ideal_s": line.printed.ideal_ms / 1e3, "batch": line.compute.batch,
        "forward_s": line.compute.forward_s, "backward_s": line.compute.backward_s, "n_steps": line.printed.n_steps,
        "recipe": line.printed.recipe, "shuffled_bytes": line.shuffled_tb * 1e12,
        "contradictions": line.contradictions,
    } for line in lines()]


def _parameters(printed: PrintedRow, counted: int) -> str:
    """Return how the printed number of parameters contradicts the count, "" if it does not."""
    if printed.millions is None or abs(printed.millions * 1e6 - counted) <= max(0.5e6, _SAME_MODEL * counted):
        return ""
    return (f"{printed.millions}M parameters are printed, but the published network has {counted / 1e6:.1f}M "
            f"({printed.millions * 1e6 / counted - 1:+.0%})")


def _ideal(printed: PrintedRow, dtype: str, counted: int) -> str:
    """Return how the printed ideal time contradicts the printed parameters or, without these, the count."""
    if printed.millions is not None:
        least = _ideal_ms((printed.millions - 0.5) * 1e6, dtype)
        most = _ideal_ms((printed.millions + 0.5) * 1e6, dtype)
        digit = 0.5 * 10 ** -len(str(printed.ideal_ms).partition(".")[2])
        if least - digit <= printed.ideal_ms <= most + digit:
            return ""
        return (f"{printed.ideal_ms:g} ms are printed, {printed.millions}M parameters of {dtype} take "
                f"{least:.2f} to {most:.2f} ms")
    expected = _ideal_ms(counted, dtype)
    if abs(printed.ideal_ms / expected - 1) <= _SAME_MODEL:
        return ""
    implied = printed.ideal_ms * 1e-3 * _GBPS * 1e9 / 8 / ITEM_NBYTES[dtype]
    return (f"{printed.ideal_ms:g} ms are printed, {counted / 1e6:.1f}M parameters of {dtype} take {expected:.2f} ms; "
            f"it would be {implied / 1e6:.0f}M")


def _ideal_ms(n_parameters: float, dtype: str) -> float:
    return n_parameters * ITEM_NBYTES[dtype] * 8 / (_GBPS * 1e9) * 1e3


def _marked(cell: str, why: str) -> str:
    return f"{cell} !" if why else cell
