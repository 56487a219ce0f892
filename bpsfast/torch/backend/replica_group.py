"""ReplicaGroup: a process group whose members can be changed between calls, as torchft's managers require.

torchft decides, step by step, which replicas of a model train together, and gives each one's process group its next
members (`configure`). In between it asks whether a call has failed (`errored`). With

    manager = torchft.Manager(pg=ReplicaGroup(timeout=timedelta(seconds=30)), ...)

bpsfast sums the gradients of all replicas. torchft itself is not needed: a program that decides about replicas
otherwise calls the same methods.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...base.settings import parse_address
from ...orchestration.errors import BpsError, ClosedError, ConfigError, PeerLostError
from ...orchestration.host_lookup import format_address
from . import worlds
from .base_group import NamedGroup
from .process_group import ProcessGroup, group_in
from .torch_compat import eager
from .work import torch_error


class ReplicaGroup(NamedGroup):
    """The calls of `ProcessGroup`, among the members of the last `configure`. Any thread; `configure` one at a time.

    Each `configure` makes a new job, with daemons and memory of its own, in about a second. Once a call has failed, or
    after `abort`, all further calls fail until the next `configure`. Results have the same bits as in any group of the
    same members.

    Parameters
    ----------
    timeout
        Of `configure`, and of each call.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(0, 1, "replicas")
        self._timeout = timeout
        self._inner: ProcessGroup | None = None
        self._why_none: BaseException | None = None  # why there is no group

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank()} of {self.size()})"

    # -- called by torchft -----------------------------------------------------------------------------------------

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, quorum_id: int | None = None,
                  group_rank: int | None = None, group_world_size: int | None = None,
                  global_ranks: Sequence[int] | None = None) -> None:
        """Become member *rank* of *world_size*, which all call this; blocks until they have. Aborts the former group.

        Parameters
        ----------
        store_addr
            "host:port/prefix" of a running `TCPStore`; no two configurations may have the same.
        replica_id, quorum_id
            Named in errors.
        group_rank, group_world_size, global_ranks
            torchft passes them; they are ignored, because a member is known by its rank in the group.

        Raises
        ------
        DistBackendError
            Some members did not come in time (it names them), or the store cannot be reached. Configure again.
        ConfigError
            *store_addr* is no such address, or *rank* is not below *world_size*; the former group stays.
        """
        who = f"replica {replica_id!r}" + (f" of quorum {quorum_id}" if quorum_id is not None else "")
        address, _, prefix = store_addr.partition("/")
        host, port = parse_address(address, f"the store_addr of {who}")
        if not prefix:
            raise ConfigError(f"{who}: store_addr is {store_addr!r}, but has to be host:port/prefix, with a prefix "
                              "that no other configuration has")
        if not 0 <= rank < world_size:
            raise ConfigError(f"{who}: rank = {rank} must be at least 0 and less than world_size = {world_size}")
        self._leave(ProcessGroup.abort, None)
        try:
            store = self._store(host, port, prefix)
            world = worlds.make(store, rank, world_size, self._timeout.total_seconds())
            self._inner = group_in(world, range(world_size), rank, self._timeout.total_seconds())
        except BpsError as exc:
            self._why_none = torch_error(type(exc)(f"{who} (rank {rank} of {world_size}): {exc}"))
            raise self._why_none from exc

    def _store(self, host: str, port: int, prefix: str) -> Any:
        try:
            return dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, wait_for_workers=False,
                                                          timeout=self._timeout))
        except (RuntimeError, ValueError) as exc:  # torch's DistError is a RuntimeError
            first = str(exc).partition("\n")[0]
            raise PeerLostError(f"no store answers at {format_address(host, port)} within "
                                f"{self._timeout.total_seconds():g} s: {first}") from exc

    def errored(self) -> BaseException | None:
        """Return why calls fail until the next `configure`: the error of the first that failed, or that of `abort`.

        None if no call has failed, and before the first `configure`.
        """
        inner = self._inner
        return self._why_none if inner is None else inner.errored()

    def abort(self, errored: bool = True) -> None:
        """Leave the group at once: calls under way fail. Does nothing before `configure`.

        *errored*: whether `errored` reports it.
        """
        why = torch_error(ClosedError("this process group was aborted: configure it anew")) if errored else None
        self._leave(ProcessGroup.abort, why)

    def shutdown(self) -> None:
        """Leave the group after its calls."""
        self._leave(ProcessGroup.shutdown, None)

    def _leave(self, end: Callable[[ProcessGroup], None], why: BaseException | None) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            self._why_none = why
            end(inner)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `configure` and of later calls."""
        self._timeout = timeout
        if self._inner is not None:
            self._inner.set_timeout(timeout)

    def register(self, name: str) -> dist.ProcessGroup:
        """Register this group with torch as *name*, for functional collectives and device meshes; return it. Once.

        torch treats it as a group of this rank alone, because a mesh cannot handle sizes that change. `unregister` ends
        the registration.
        """
        backend = f"{self.getBackendName()}:{name}"
        dist.Backend.register_backend(backend, lambda *_: self, devices=["cpu", "cuda"])
        group = dist.new_group(ranks=[dist.get_rank()], backend=backend, group_desc=backend,
                               timeout=timedelta(seconds=60))
        assert isinstance(group, dist.ProcessGroup)
        return group

    def unregister(self) -> None:
        """Undo `register`, and shut the group down."""
        dist.destroy_process_group(self)

    # -- the present group -----------------------------------------------------------------------------------------

    def size(self) -> int:
        """Return the number of members; 1 without a group."""
        return 1 if self._inner is None else self._inner.size()

    def rank(self) -> int:
        """Return this member's number; 0 without a group."""
        return 0 if self._inner is None else self._inner.rank()

    getSize, getRank = size, rank

    def _present(self) -> ProcessGroup:
        inner = self._inner
        if inner is not None:
            return inner
        if self._why_none is not None:
            raise self._why_none.with_traceback(None)  # its traceback would keep earlier callers' frames alive
        raise torch_error(ClosedError("this process group has no members yet: call configure(store_addr, replica_id, "
                                      "rank, world_size) first"))


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: ReplicaGroup, *args: Any, **options: Any) -> Any:
        return getattr(self._present(), name)(*args, **options)

    call.__name__, call.__qualname__ = name, f"ReplicaGroup.{name}"
    call.__doc__ = getattr(ProcessGroup, name).__doc__
    return eager(call)


for _name in ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
              "_reduce_scatter_base", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "broadcast",
              "allgather", "allgather_coalesced", "all_gather_single", "_allgather_base", "all_gather_single_coalesced",
              "allgather_into_tensor_coalesced", "barrier", "gather", "gather_single", "gather_into_tensor", "scatter",
              "reconfigure", "alltoall", "all_to_all_single", "alltoall_base", "send", "recv", "recv_anysource",
              "monitored_barrier", "_start_coalescing", "_end_coalescing", "_get_sequence_number_for_group",
              "_set_sequence_number_for_group"):
    setattr(ReplicaGroup, _name, _forwarded(_name))
