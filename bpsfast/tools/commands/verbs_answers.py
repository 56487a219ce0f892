"""What libibverbs says about ports and GIDs, to be shown beside what the kernel says (``--verbs`` of devices, gids)."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from ...hardware.gids import Gid
from ...hardware.host import Host
from ...hardware.verbs import provider


def asked(verbs: str | None, root: str | None) -> Any:
    """Return the implementation that ``--verbs`` names, None without the option.

    Raises
    ------
    VerbsMissing
        It cannot be used here (an OSError).
    """
    if verbs is None:
        return None
    if root is not None:
        raise click.UsageError("--verbs asks this machine's libibverbs, --root looks at another machine: choose one")
    return provider(verbs)


def active_mtus(verbs: Any, host: Host) -> dict[str, str]:
    """Return the path MTU that each port runs with, by "device/port"; where there is none, the reason."""
    listed = verbs.devices()
    return {f"{device.name}/{port.number}": _ask(verbs, listed, device.name, partial(_active_mtu, port.number))
            for device, port in host.ports}


def verdicts(verbs: Any, rows: list[Gid]) -> dict[Gid, str]:
    """Return for each row of the kernel's table what libibverbs says: "same", another GID, or the reason."""
    listed = verbs.devices()
    return {row: _ask(verbs, listed, row.device, partial(_verdict, row)) for row in rows}


def _active_mtu(number: int, opened: Any) -> str:
    return str(opened.port(number)["active_mtu"])


def _verdict(row: Gid, opened: Any) -> str:
    found = opened.gid(row.port, row.index)
    return "same" if found == row.value else found.hex(":", 2)


def _ask(verbs: Any, listed: list[str], name: str, question: Callable[[Any], str]) -> str:
    if name not in listed:
        return "not listed"
    try:
        with verbs.Device(name) as opened:
            return question(opened)
    except OSError as exc:
        return exc.strerror or str(exc)
