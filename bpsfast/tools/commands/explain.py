"""``bpsfast explain``: what an error code means and what to do about it."""
from __future__ import annotations

import click

from ...base import command_errors, output


@click.command()
@click.argument("code", nargs=-1, required=True)
@output.options()
@command_errors.exit_on_error
def command(code: tuple[str, ...], as_json: bool, path: str | None, no_color: bool) -> None:
    """Say what CODE means and what to do about it.

    CODE is a check of the doctor, a completion's status (with the vendor's error after a slash), an errno, one of
    bpsfast's error classes, an exit code, or lines pasted from a log: of perftest, rdma-core, the kernel, UCX, NCCL.

    \b
    bpsfast explain RD05
    bpsfast explain 12/129
    bpsfast explain IBV_WC_WR_FLUSH_ERR
    bpsfast explain ETIMEDOUT
    bpsfast explain exit 3
    bpsfast explain "Got completion with error 12, opcode 1, vendor err 129"
    """
    from . import explanations

    chosen = output.form(as_json, path, no_color)
    found = explanations.explain(" ".join(code))
    output.show(chosen, lambda: "\n\n".join(map(str, found)),
                [{"head": each.head, "lines": [{"label": label, "text": words} for label, words in each.lines]}
                 for each in found])
