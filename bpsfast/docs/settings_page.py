"""``python -m bpsfast.docs.settings_page``: writes the tables of ``settings.md`` from the settings in the code.

The text between the two marks of each table is generated; the rest is not. `tests/project/test_docs.py` fails if the
page is out of date.
"""
from __future__ import annotations

from pathlib import Path

from bpsfast.base import settings
from bpsfast.base.byteps_variables import NO_EFFECT, NOT_OBEYED
from bpsfast.tools.commands import info

PAGE = Path(__file__).with_name("settings.md")
_Table = list[tuple[str, ...]]


def tables() -> dict[str, _Table]:
    """Return the rows of each table by the name in its marks; the first row is the head."""
    loaded, origins = settings.load_with_origins(environ={})
    rows: _Table = [("variable", "default", "unit", "agree", "meaning", "BytePS's")]
    for each in info.setting_rows(loaded, origins):
        default = "1" if each.default is True else "0" if each.default is False else str(each.default)
        kind = f" (`{each.kind.replace('|', '`, `')}`)" if "|" in each.kind else ""
        rows.append((f"`{each.variable}`", f"`{default}`" if default else "", each.unit, "yes" if each.agree else "",
                     each.doc + kind, ", ".join(f"`{name}`" for name in each.byteps)))
    without: _Table = [("variable", "why")]
    without += [(f"`{name}`", why) for name, why in {**NOT_OBEYED, **NO_EFFECT}.items()]
    return {"settings": rows, "without effect": without}


def written(page: str) -> str:
    """Return the text of *page* with current tables; raises ValueError unless it has the marks of each table once."""
    for name, rows in tables().items():
        begin, end = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"{begin.strip()} and {end} must stand in the page once each, around the table of {name}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{_markdown(rows)}\n{end}{rest.partition(end)[2]}"
    return page


def _markdown(rows: _Table) -> str:
    """Return a table of *rows*; characters that would end a cell or begin HTML are escaped."""
    shown = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in shown]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:], ""])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
