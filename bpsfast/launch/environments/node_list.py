"""Slurm's short forms: lists of nodes ("gpu[01-03,7]-ib,login") and of tasks for each node ("4(x2),3")."""
from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

#: Slurm itself has no more nodes than this.
_MOST_NODES = 1 << 16
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand(text: str) -> list[str]:
    """Return the names in *text*, in its order.

    A name may have several brackets, each a list of numbers and ranges; a number has as many digits as the first of its
    range is written with.

    Raises
    ------
    ValueError
        Where *text* is no such list; the message says what is wrong.
    """
    names: list[str] = []
    for item in _items(text):
        pieces = re.split(r"\[([^][]*)\]", item)  # text, range, text, ..., text
        if any("[" in piece or "]" in piece for piece in pieces[::2]):
            raise ValueError(f"brackets do not match in {item!r}")
        choices = [[piece] if i % 2 == 0 else _numbers(piece) for i, piece in enumerate(pieces)]
        n_names = len(names)
        for choice in choices:
            n_names = max(1, n_names - len(names)) * len(choice) + len(names)
        if n_names > _MOST_NODES:
            raise ValueError(f"{item!r} stands for more than {_MOST_NODES} nodes")
        names += map("".join, itertools.product(*choices))
    return names


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node.

    Raises
    ------
    ValueError
        Where *text* is no such list.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is no number of tasks such as 4 or 4(x2)")
        n_nodes = int(match[2] or 1)
        if len(counts) + n_nodes > _MOST_NODES:
            raise ValueError(f"{item!r} stands for more than {_MOST_NODES} nodes")
        counts += [int(match[1])] * n_nodes
    return counts


def _items(text: str) -> Iterator[str]:
    """Split at commas that are in no bracket."""
    item, is_inside = "", False
    for letter in text + ",":
        if letter == "," and not is_inside:
            if not item:
                raise ValueError("a name is empty")
            yield item
            item = ""
            continue
        is_inside = letter == "[" or (is_inside and letter != "]")
        item += letter
    if is_inside:
        raise ValueError(f"a bracket is not closed in {item[:-1]!r}")


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise ValueError(f"{piece!r} is no number and no range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {piece} ends before it begins")
        if last - first >= _MOST_NODES:
            raise ValueError(f"the range {piece} stands for more than {_MOST_NODES} nodes")
        found += (f"{number:0{len(match[1])}d}" for number in range(first, last + 1))
    return found
