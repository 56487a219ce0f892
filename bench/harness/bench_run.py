"""One run of a benchmark: the options that were given to it, and the result file that it writes."""
from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bpsfast.bench.harness import machine_info, table
from bpsfast.launch.namespaces import netns
from bpsfast.orchestration.errors import LackingError


class BenchRun(dict[str, Any]):
    """The *options* of benchmark *bench* that are not None, by name. The run begins when this is made.

    `quick` tells whether a short run was asked for.
    """

    def __init__(self, bench: str, options: Mapping[str, Any]) -> None:
        super().__init__({name: value for name, value in options.items() if value is not None})
        self._bench, self._begin_unix_s = bench, time.time()
        self.quick = bool(self.get("quick"))

    def rounds(self, default: int, quick: int = 1) -> int:
        """Return option n_rounds; without it *quick* for a quick run, else *default*."""
        return self.get("n_rounds") or (quick if self.quick else default)

    def require_links(self) -> None:
        """Raise `LackingError` where no network namespaces, machines with links of their own, can be made."""
        lacking = netns.missing()
        if lacking is not None:
            raise LackingError(f"bench {self._bench} needs machines with links of their own: {lacking}")

    def finish(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return *records* behind the manifest of this run, which ends now; write them where option json_path says."""
        options = {name: str(value) for name, value in self.items() if name != "json_path"}
        manifest = {"bench": self._bench, "format": 1, "options": options, "machine": machine_info.describe(),
                    "begin_unix_s": self._begin_unix_s, "end_unix_s": time.time()}
        whole = [manifest, *records]
        if "json_path" in self:
            table.write(Path(self["json_path"]), whole)
        return whole
