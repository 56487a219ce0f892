"""The base class of bpsfast's torch process group: its names and abilities for torch, the start of calls, its end."""
from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from ...collectives.group import Group
from ...collectives.serial_executor import SerialExecutor
from ...orchestration.errors import BpsError
from ...pyx.direct import CallOptions
from ...trainer.session import Session
from . import torch_compat, worlds
from .device_calls import current
from .messages import Messages
from .operands import Operand
from .work import Work, torch_error

_log = logging.getLogger("bpsfast.torch")

#: The end of a group is logged if it waits for longer than this.
_WARN_AFTER_S = 5.0
#: Maximum time for the last call to return after its session has ended.
_CLOSE_TIMEOUT_S = 10.0


#: By method of `pyx.direct.DirectCalls` the type of its options.
_OPTIONS: dict[str, type] = {
    "allreduce": dist.AllreduceOptions, "reduce": dist.ReduceOptions, "broadcast": dist.BroadcastOptions,
    "allgather": AllgatherOptions, "reduce_scatter": dist.ReduceScatterOptions, "alltoall": dist.AllToAllOptions,
    "barrier": dist.BarrierOptions}
_AT_ONCE = (*_OPTIONS, "all_gather_single", "reduce_scatter_single", "all_to_all_single")


@functools.cache
def _call_options() -> dict[str, CallOptions]:
    """Return by method how the options of its calls are read."""
    ops = [dist.ReduceOp(op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN,
                                        dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)]
    return {name: CallOptions(kind, ops if hasattr(kind, "reduceOp") else None) for name, kind in _OPTIONS.items()}


#: Device types whose tensors a group takes, in the order in which torch lists those of gloo.
_DEVICE_TYPES = ("cuda", "cpu")


class NamedGroup(dist.ProcessGroup):
    """A group's answers to torch about itself: rank, size, names, devices, abilities. torch may change *name*."""

    # torch asks its backends for these; calls may be collected and waited for together.
    supports_splitting = supports_time_estimate = supports_shrinking = False
    supports_coalescing = True

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._names = {"name": name, "desc": "undefined"}
        self.store: Any = None  # with which torch has made the group

    def getBackendName(self) -> str:
        return torch_compat.NAME

    name = _get_backend_name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._names["name"] = name

    def _set_group_desc(self, text: str) -> None:
        self._names["desc"] = text

    def getGroupName(self) -> str:
        return self._names["name"]

    def getGroupDesc(self) -> str:
        return self._names["desc"]

    def get_group_store(self) -> Any:
        return self.store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in _DEVICE_TYPES]

    def _get_backend(self, device: Any) -> NamedGroup:
        """Return the group itself, or raise RuntimeError if it takes no tensors on *device*."""
        kind = torch.device(device).type
        if kind not in _DEVICE_TYPES:  # not by the property, which the compiler of torch 2.14 cannot trace
            raise RuntimeError(f"No backend type associated with device type {kind}: {torch_compat.NAME} "
                               "takes tensors of the CPU and of CUDA devices")
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: calls need no special memory."""
        return False

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)


class BaseGroup(NamedGroup):
    """Starts the calls of `ProcessGroup`, which *group* executes in order. The end of the group leaves *world*."""

    def __init__(self, world: worlds.World, group: Group, rank: int, size: int) -> None:
        super().__init__(rank, size, group.name)
        self._world: worlds.World | None = world
        self._group = group
        self._messages = Messages(group)
        self._executor = SerialExecutor(group.name)
        self._coalesced: list[Work] | None = None
        self._n_started = 0
        #: By method what takes its arguments and returns whether it has made the call (`pyx.direct.DirectCalls`).
        self._at_once: dict[str, Callable[..., bool]] = {}
        self._failure: BaseException | None = None

    @property
    def session(self) -> Session:
        return self._group.session

    # -- what torch asks it ----------------------------------------------------------------------------------------

    @property
    def options(self) -> Any:
        """The backend's options, as torch calls them: its name and the timeout of a call."""
        return torch_compat.BackendOptions(torch_compat.NAME, timedelta(seconds=self._group.timeout_s))

    def _get_sequence_number_for_group(self) -> int:
        return self._n_started + self._group.n_calls_at_once

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are counted from the start."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls."""
        self._group.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def errored(self) -> BaseException | None:
        """Return the error of the first call that failed, as its `Work` raises it, or None. Any thread."""
        return self._failure

    # -- calls -----------------------------------------------------------------------------------------------------

    def _start(self, text: str, results: Sequence[torch.Tensor], opts: Any, run: Callable[[], None],
               written: Sequence[Operand] = ()) -> Work:
        if not self._at_once:
            self._prepare()
        self._n_started += 1
        timeout_s = torch_compat.timeout_of(opts, self._group.timeout_s)
        call = current()
        work = Work(results, timeout_s, text, call)
        work.tell_failure(self._failed)

        def job() -> None:
            if call is not None:
                call.arrive(timeout_s)
            with self._group.within(timeout_s):
                run()
            for each in written:
                each.take_back()
            if call is not None:
                call.leave()

        inline = torch_compat.is_waited_for(opts) and self._coalesced is None
        if call is not None:
            call.is_under_way = True
        try:
            self._group.require_outside()
            self._executor.run(job, work.finish, inline)
        except BpsError as exc:
            if call is not None:
                call.end()
            raise torch_error(exc) from exc
        return self._noted(work)

    def _prepare(self) -> None:
        """Let later calls that are waited for be made without a `Work`, if the ranks move the bytes themselves."""
        if self._coalesced is None and self._executor.is_idle and not self.session.settings.host_device:
            calls = self._group.calls_at_once(torch.Tensor, _call_options(), self._executor,
                                              lambda opts: torch_compat.timeout_of(opts, self._group.timeout_s),
                                              self._noted_failure)
            if calls is not None:
                self._at_once = {name: getattr(calls, name) for name in _AT_ONCE}

    def _noted(self, work: Work) -> Work:
        """Return *work*, after adding it to those that are being coalesced; successful ones are dropped from them."""
        if self._coalesced is not None:
            self._coalesced = [each for each in self._coalesced if each.is_on_device or not each.is_success()]
            self._coalesced.append(work)
        return work

    def _message(self, begin: Callable[[], Work]) -> Work:
        call = current()
        try:
            if call is not None:
                call.arrive(self._group.timeout_s)  # a message is sent at once
            work = begin()
        except BpsError as exc:
            raise torch_error(exc) from exc
        work.tell_failure(self._failed)
        return self._noted(work)

    def _failed(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _noted_failure(self, error: BaseException) -> BaseException:
        """Return what a call raises that has failed with *error*."""
        raised = torch_error(error)
        self._failed(raised)
        return raised

    @torch_compat.eager
    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced, self._at_once = [], {}

    @torch_compat.eager
    def _end_coalescing(self, device: torch.device) -> Work:
        """Return one work for all calls since `_start_coalescing`."""
        works, self._coalesced = self._coalesced or [], None

        def wait_for_all() -> None:
            for work in works:
                work.wait()

        whole = self._start("coalesced calls", [], dist.BarrierOptions(), wait_for_all)
        whole.includes(works)
        return whole

    # -- the end ---------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End the group at once: calls under way fail, on all members if it is the last group of the job."""
        self._end(0.0)

    def shutdown(self) -> None:
        """End the group after its calls; at once while an exception is handled, as in a ``finally``.

        In that case the other members may never make the calls that are under way here, and must learn that this
        member is gone.
        """
        self._end(self._group.timeout_s if sys.exc_info()[1] is None else 0.0)

    def _end(self, timeout_s: float) -> None:
        world, self._world = self._world, None
        if world is None:
            return
        ended = self._executor.close(min(timeout_s, _WARN_AFTER_S))
        if not ended and timeout_s > _WARN_AFTER_S:
            _log.warning("group %r is destroyed, and its last call waits for other members: for %g s at most",
                         self.group_name, timeout_s)
            ended = self._executor.close(timeout_s - _WARN_AFTER_S)
        self._messages.close()
        with contextlib.suppress(BpsError):  # the job may be over, with all its memory
            self._group.close()
        worlds.quit(world)
        if not ended:
            self._executor.close(_CLOSE_TIMEOUT_S)
