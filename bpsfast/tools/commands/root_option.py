"""The option ``--root``: look at a recorded machine instead of this one."""
from __future__ import annotations

from collections.abc import Callable

import click


def root_option(function: Callable) -> Callable:
    """Add the option ``--root``; its value, None for this machine, arrives as the parameter *root*."""
    return click.option(
        "--root", type=click.Path(), metavar="DIR",
        help="Look at a machine recorded below DIR (its /sys, /proc, /dev) instead of this one.")(function)
