"""Every setting with its value here and now and where that came from: ``bpsfast env`` and ``bpsfast info --effective``.
"""
from __future__ import annotations

import textwrap

import msgspec

from ...base import output, settings

_INDENT = "    "
_SECRET = "job_key"


class SettingRow(msgspec.Struct, frozen=True):
    """One setting as it holds here. `value` of a secret is "(set)"; `origin`: default, a variable, a profile, the
    command line. `byteps`: BytePS's variables for it; `agree`: all processes of a job must have the same value.
    """

    name: str
    variable: str
    value: bool | int | float | str
    origin: str
    default: bool | int | float | str
    kind: str
    unit: str
    byteps: tuple[str, ...]
    agree: bool
    doc: str


def setting_rows(loaded: settings.Settings, origins: dict[str, str]) -> list[SettingRow]:
    """Return every setting, in the order of the table."""
    return [SettingRow(row.name, row.variable, _shown(row.name, getattr(loaded, row.name)), origins[row.name],
                      row.default, row.kind, row.unit, row.aliases, row.agree, row.doc) for row in settings.table()]


def _shown(name: str, value: bool | int | float | str) -> bool | int | float | str:
    """Return *value*, but of a secret only whether it is set."""
    return "(set)" if name == _SECRET and value else value


def settings_text(found: list[SettingRow]) -> str:
    """Return one line for each setting; on a terminal what it means stands below, as wide as that is."""
    cells = [(each.variable, "-" if each.value == "" else str(each.value), each.origin) for each in found]
    docs = [f"{each.kind}{f' [{each.unit}]' if each.unit else ''}: {each.doc}"
            f"{f' (BytePS: {chr(44).join(each.byteps)})' if each.byteps else ''}" for each in found]
    width = output.terminal_width()
    if width is None:
        return output.columns([(*row, doc) for row, doc in zip(cells, docs)])
    heads = output.columns(cells).splitlines()
    return "\n".join(f"{head}\n{textwrap.fill(doc, width, initial_indent=_INDENT, subsequent_indent=_INDENT)}"
                     for head, doc in zip(heads, docs))
