"""Starts the processes of all libraries that a benchmark compares, each on the right machine, and closes them all."""
from __future__ import annotations

import itertools
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bpsfast.base import settings
from bpsfast.base.process_identity import folder_prefix
from bpsfast.bench.harness.contestant_group import START_TIMEOUT_S, Group, Start
from bpsfast.launch import local_job as launch
from bpsfast.launch.daemons import clean_environment, reserve_port
from bpsfast.launch.namespaces import Cluster, FaultyLink
from bpsfast.launch.processes import Command, Kind

_LOOPBACK = "127.0.0.1"
#: In a cluster's namespaces every port is free; each contestant takes the next one of its kind.
_PORTS = {"gloo": 7700, "raw": 7802, "bpsfast": 7803}
#: Settings of jobs of dozens of processes on two cores: control messages may be late without a process being lost.
SLOW_CONTROL_PLANE: dict[str, Any] = {"heartbeat_s": 2.0, "lease_s": 30.0, "helper_lease_s": 0}


class ContestantLauncher:
    """Starts the contestants of one benchmark and closes them all at its end. A context manager.

    *n_ranks* and *n_nodes* are the shape of the job; peers have as many ranks. *cluster* has machines node0, node1 and
    so on; None: everything runs on this machine.
    """

    def __init__(self, n_ranks: int, n_nodes: int, cluster: Cluster | FaultyLink | None = None) -> None:
        self._shape = launch.shape_of(n_ranks, n_nodes, 0)
        self._cluster = cluster
        self._groups: list[Group] = []
        self._numbers = itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix=folder_prefix("bench"))  # only this user may enter it

    def __enter__(self) -> ContestantLauncher:
        return self

    def __exit__(self, *exc: object) -> None:
        for group in self._groups:
            group.close()
        self._folder.cleanup()

    def bpsfast(self, n_helpers: int = 0, more: Mapping[str, Mapping[str, str]] | None = None,
                trainer: Mapping[str, Any] | None = None, device: str = "",
                training: Mapping[str, Any] | None = None, **values: Any) -> Group:
        """Start a job of bpsfast with settings *values*; *more*: variables of the processes on a machine, by its name.

        Its ranks are of class `BpsfastRank`, or `schedule.trainer.Trainer` with options *trainer*, `device.DeviceRank`
        on *device*, or `training.TrainingRank` with options *training*. Nothing is encrypted unless *values* ask for
        it, as the peers do not encrypt either; `two_nodes` shows the cost of encryption.
        """
        shape = msgspec.structs.replace(self._shape, n_helpers=n_helpers)
        kind = "trainer" if trainer else "training" if training else "device" if device else "bpsfast"
        program, folder = self._program(kind, trainer or training or ({"device": device} if device else {}))
        if n_helpers:  # a job starts without late helpers; the group's own timeout is shorter
            values["start_timeout_s"] = max(values.get("start_timeout_s", 0.0), 2 * START_TIMEOUT_S)
        loaded = settings.load({"encryption": "off"} | values, {})  # without the user's own settings
        with reserve_port(_LOOPBACK) as reserved:
            scheduler = reserved.getsockname()
            if self._cluster is not None:
                scheduler = self._cluster.hub.address, _PORTS["bpsfast"] + next(self._numbers)
            commands = launch.plan(shape, program, loaded, os.environ, scheduler, secrets.token_hex(32), self._cluster)
            commands.sort(key=lambda command: command.kind is Kind.RANK)
            starts = [Start(command.argv, {**command.environ, **added(command, shape, more or {})}, command.via)
                      for command in commands]
            return self._start("bpsfast", starts, folder)

    def dismiss(self, group: Group) -> None:
        """End one contestant before the others."""
        self._groups.remove(group)
        group.close()

    def gloo(self, trainer: Mapping[str, Any] | None = None) -> Group:
        """Start gloo's ranks, over loopback or the cluster's links. *trainer* as for `bpsfast`."""
        return self._torch_ranks("gloo", *self._program("trainer" if trainer else "gloo", trainer or {}))

    def torch_group(self, backend: str) -> Group:
        """Start the ranks of a process group of torch, made by *backend* (`ddp.member.Member`)."""
        return self._torch_ranks(backend, *self._program("ddp", {"backend": backend}))

    def training(self, backend: str, options: Mapping[str, Any]) -> Group:
        """Start ranks that train by *backend* (`training.backends`), `training.rank.TrainingRank`s with *options*."""
        if backend == "bpsfast":
            return self.bpsfast(training=options)
        if backend != "horovod":
            return self._torch_ranks(backend, *self._program("training", options))
        program, folder = self._program("training", options)
        argv = ["horovodrun", "-np", str(sum(self._shape.ranks)), *program]
        return self._start(backend, [Start(argv, self._environ())], folder)

    def mpi(self) -> Group:
        """Start Open MPI's ranks, on this machine only."""
        program, folder = self._program("mpi", {})
        argv = ["mpirun", "--oversubscribe", "-n", str(sum(self._shape.ranks)), *program]
        if os.geteuid() == 0:
            argv.insert(1, "--allow-run-as-root")
        return self._start("mpi", [Start(argv, self._environ())], folder)

    def raw(self) -> Group:
        """Start the two ends of a plain exchange of bytes over sockets, the bound of the network."""
        with reserve_port(_LOOPBACK) as reserved:
            host, port = self._place(1, reserved.getsockname()[1], "raw")
        starts = []
        folder = self._new_folder()
        for rank in range(2):
            program, _ = self._program("raw", {"rank": rank, "host": host, "port": port}, folder)
            starts.append(Start(program, self._environ(), self._via(rank)))
        return self._start("raw", starts, folder, size=2)

    # -- innards ---------------------------------------------------------------------------------------------------

    def _torch_ranks(self, name: str, program: Sequence[str], folder: Path) -> Group:
        with reserve_port(_LOOPBACK) as reserved:
            host, port = self._place(0, reserved.getsockname()[1], "gloo")
        environ = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(sum(self._shape.ranks)),
                   "GLOO_SOCKET_IFNAME": "eth0" if self._cluster else "lo"}
        starts = [Start(program, self._environ() | environ | {"RANK": str(rank)}, self._via(node))
                  for rank, node in enumerate(self._nodes())]
        return self._start(name, starts, folder)

    def _start(self, kind: str, starts: Sequence[Start], folder: Path, size: int | None = None) -> Group:
        group = Group(kind, starts, sum(self._shape.ranks) if size is None else size, folder)
        self._groups.append(group)
        return group

    def _program(self, kind: str, options: Mapping[str, Any], folder: Path | None = None) -> tuple[list[str], Path]:
        folder = self._new_folder() if folder is None else folder
        text = json.dumps(dict(options))
        return [sys.executable, "-m", "bpsfast.bench.harness.contestant", kind, str(folder / "socket"), text], folder

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder.name))

    def _nodes(self) -> list[int]:
        return [node for node, n_local in enumerate(self._shape.ranks) for _ in range(n_local)]

    def _via(self, node: int) -> Sequence[str]:
        return self._cluster[f"node{node}"].via() if self._cluster else ()

    def _place(self, node: int, free_port: int, kind: str) -> tuple[str, int]:
        if self._cluster is None:
            return _LOOPBACK, free_port
        return self._cluster[f"node{node}"].address, _PORTS[kind] + (next(self._numbers) if kind == "gloo" else 0)

    @staticmethod
    def _environ() -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"} | clean_environment(os.environ)


def added(command: Command, shape: launch.JobShape, more: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    """Return the variables of *more*, by names of machines (`JobShape.machines`), for a process of `launch.plan`."""
    index = command.environ.get("BPSFAST_NODE_INDEX")
    return {} if index is None else more.get(shape.machines[int(index)], {})
