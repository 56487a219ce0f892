"""Settings on the command line: ``--set NAME=VALUE``, for every command that reads settings."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ...orchestration.errors import ConfigError


def set_option(function: Callable) -> Callable:
    """Add the option ``--set``; its values arrive as the parameter *assignments*."""
    return click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", shell_complete=_names,
                        help="Any setting, such as --set partition_bytes=1000000 (`bpsfast env` lists them).")(function)


def _names(context: click.Context, option: click.Parameter, incomplete: str) -> list[str]:
    """Return the settings that begin with what was typed."""
    from ...base.settings import table

    return [f"{row.name}=" for row in table() if row.name.startswith(incomplete.replace("-", "_"))]


def verbs_option(function: Callable) -> Callable:
    """Add the option ``--verbs``, the setting of that name; it arrives as the parameter *verbs*, None if not given."""
    return click.option("--verbs", type=click.Choice(["native", "pyverbs"]), metavar="native|pyverbs",
                        help="Which implementation of RDMA verbs to use (native).")(function)


def overrides(assignments: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Return what the command line sets: NAME=VALUE assignments and, over them, the options that were given."""
    given: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: expected NAME=VALUE")
        name = name.strip().lower().replace("-", "_")
        if name == "job_key":
            raise ConfigError("--set job_key: every user of this machine can read command lines; set BPSFAST_JOB_KEY, "
                              "or put the key into a file and name that: --set job_key_file=PATH")
        given[name] = value
    return given | {name: value for name, value in options.items() if value is not None}
