"""Words of a page with fields in them, and how the fields follow from a file of `bench/results`."""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bpsfast.bench import drawn
from bpsfast.orchestration.errors import ConfigError

_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")
_NUMBER = r"([-+]?\d+(?:,\d{3})*(?:\.\d+)?)"
Records = list[Mapping[str, Any]]
Numbers = dict[str, float]


class Claim(NamedTuple):
    """`words` of the README, whose fields are `numbers` of the rows of a result file."""

    file: str
    words: str
    numbers: Callable[[Records], Numbers]

    def pattern(self) -> re.Pattern[str]:
        """Return what finds the words, however their lines are broken, with any numbers in its groups."""
        parts = re.split(_FIELD.pattern, self.words)[::3]
        return re.compile(_NUMBER.join(r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in parts))

    def measured(self, results: Path) -> list[str]:
        """Return the fields as they are to be written.

        Raises
        ------
        ConfigError
            If there is no such file in *results*.
        """
        path = results / self.file
        if path.suffix == ".json":
            if not path.exists():
                raise ConfigError(f"{path} is missing: `make results` writes it")
            rows: Records = [json.loads(path.read_text(encoding="utf-8"))]
        else:
            rows = list(drawn.records(path))
        numbers = self.numbers(rows)
        return [_written(numbers[name], format_) for name, format_ in _FIELD.findall(self.words)]


def _written(value: float, format_: str) -> str:
    text = format(value, format_)
    return format(0.0, format_.replace("+", "")) if float(text.replace(",", "")) == 0 else text  # zero has no sign
