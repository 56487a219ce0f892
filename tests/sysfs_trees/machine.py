"""A recorded machine that a test may change before it looks: files, links, the kernel's answers."""
from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bpsfast.base import settings
from bpsfast.hardware.host import ANSWERS, Host, open_host
from bpsfast.hardware.rdma_route import peer_address
from bpsfast.tools.doctor.examination import CHECKS, lacking
from bpsfast.tools.doctor.facts import Facts, PeerReport, recorded_verbs
from bpsfast.tools.doctor.finding import Outcome
from tests.sysfs_trees import unpack


class Machine:
    """The tree *name* below *root*."""

    def __init__(self, name: str, root: Path) -> None:
        self.root = unpack(name, root)
        self.answers = json.loads((root / ANSWERS).read_text())

    def write(self, path: str, content: str) -> Machine:
        """Write a file, also in place of another one."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(content + "\n")
        return self

    def remove(self, path: str) -> Machine:
        """Remove a file, a link or a folder."""
        place = self.root / path
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()
        return self

    def answer(self, **fields: Any) -> Machine:
        """Change fields of answers.json."""
        self.answers.update(fields)
        (self.root / ANSWERS).write_text(json.dumps(self.answers))
        return self

    def verbs(self, **fields: Any) -> Machine:
        """Change what libibverbs says as a whole."""
        return self.answer(verbs=self.answers["verbs"] | fields)

    def opened(self, device: str, **fields: Any) -> Machine:
        """Change what libibverbs says of one device."""
        devices = dict(self.answers["verbs"]["devices"])
        devices[device] = devices[device] | fields
        return self.verbs(devices=devices)

    def locked(self, soft: str, hard: str = "unlimited") -> Machine:
        """Change the limit of locked memory."""
        return self.write("proc/self/limits", f"Max locked memory         {soft:<20} {hard:<20} bytes")

    def hyperthreads(self) -> Machine:
        """Make the second half of each NUMA node's CPUs the second threads of the cores that the first half are of."""
        for node in self.host.numa.values():
            cpus = sorted(node.cpus)
            for pair in zip(cpus, cpus[len(cpus) // 2:]):
                for cpu in pair:
                    self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
                               ",".join(map(str, pair)))
        return self

    def allow(self, cpus: str) -> Machine:
        """Change what this process may run on."""
        return self.write("proc/self/status", f"Name:\tpython3\nCpus_allowed_list:\t{cpus}")

    @property
    def host(self) -> Host:
        """The machine as it is now."""
        return open_host(str(self.root))

    def facts(self, peer: str = "", peer_says: bool = True, **values: Any) -> Facts:
        """Return the facts, with *values* as settings; *peer_says*: the doctor at *peer* answers as recorded."""
        host = self.host
        loaded, origins = settings.load_with_origins(values, {})
        facts = Facts(host, loaded, origins, recorded_verbs(self.answers.get("verbs")),
                      (peer, peer_address(host, peer)) if peer else None, 0.1)
        if peer and peer_says:
            facts.peer_report = msgspec.convert(self.answers["peer"], PeerReport)
        return facts

    def check(self, run: Callable[[Facts], Outcome], peer: str = "", **values: Any) -> Outcome:
        """Return what the check that *run* belongs to finds, or that it is skipped."""
        facts = self.facts(peer, **values)
        check = next(each for each in CHECKS if each.run is run)
        return lacking(check, facts) or run(facts)


def commands(outcome: Outcome) -> dict[str, str]:
    """Return the commands of an outcome by where to type them."""
    return {action.where: action.command for action in outcome.actions}
