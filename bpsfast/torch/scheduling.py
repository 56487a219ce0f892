"""Sends the all-reduces of a torch process group (gloo, NCCL, ...) by priority, in one order on all ranks.

    schedule = bpsfast.torch.schedule()                  # on every rank of the group
    future = schedule.all_reduce(gradient, name="conv1.weight", priority=-layer)
    future.wait()
    model.register_comm_hook(schedule, bucket_hook)      # or: buckets of DistributedDataParallel

Each tensor is cut into partitions, so that an urgent tensor overtakes a large one that has begun; at most
*credit_nbytes* are under way. Source: ByteScheduler (SOSP'19) sections 3 and 4.
"""
from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..base.addresses import is_loopback
from ..base.job_key import given_key
from ..base.resources import Closing
from ..base.settings import load_with_origins
from ..base.value_formats import parse_ports
from ..collectives.turn_service import Finish, TurnService
from ..orchestration.errors import BusyError, ConfigError, UnsupportedError
from ..orchestration.priority.turns import Entry
from ..orchestration.security import job_key
from .partwise_future import PartwiseFuture, raising


def schedule(group: dist.ProcessGroup | None = None, *, partition_nbytes: int = 4 << 20, credit_nbytes: int = 16 << 20,
             timeout_s: float = 300.0) -> Schedule:
    """Return a `Schedule`, which reduces over *group* (None: all ranks) by priority. Every rank of the group calls it.

    From then on no other code may use *group*, not even for a barrier: give the schedule a group of its own
    (`dist.new_group`) where other code uses the default one.

    Parameters
    ----------
    partition_nbytes, credit_nbytes
        The size of partitions, and the number of bytes that may be under way at a time; rank 0's credit counts.
    timeout_s
        Longest time without progress while reductions are pending.

    Raises
    ------
    ConfigError
        If torch.distributed is not initialised, this process is not in *group*, or a number is not positive.
    """
    if not dist.is_initialized():
        raise ConfigError("bpsfast.torch.schedule needs torch.distributed: call init_process_group first")
    if partition_nbytes < 1 or credit_nbytes < 0 or not timeout_s > 0:
        raise ConfigError(f"partition_nbytes must be positive, credit_nbytes not negative, timeout_s positive; got "
                          f"{partition_nbytes}, {credit_nbytes}, {timeout_s}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError("this process is not in the group that is to be scheduled")
    return Schedule(group, rank, partition_nbytes, credit_nbytes, timeout_s)


class Schedule(Closing):
    """Reduces tensors over a process group by priority; `schedule` makes it. Any thread."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, partition_nbytes: int, credit_nbytes: int,
                 timeout_s: float) -> None:
        self._group = group
        self._partition_nbytes = partition_nbytes
        self.size = dist.get_world_size(group)
        self._lock = threading.Lock()
        self._names: set[str] = set()  # under way, until all partitions are done
        settings = load_with_origins()[0]
        given = given_key(settings)  # torch's group is not encrypted; a rank may have no key
        self._turns = TurnService(rank, self.size, self._agree, host=_own_host, credit_nbytes=credit_nbytes,
                                  timeout_s=timeout_s, secret=job_key(given, "") if given else b"",
                                  ports=parse_ports(settings.ports), advertise=settings.advertise)

    def _agree(self, message: bytes | None) -> bytes:
        """Return the message of the group's first rank."""
        box: list[Any] = [message]
        first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        dist.broadcast_object_list(box, src=first, group=self._group)
        return bytes(box[0])

    def all_reduce(self, tensor: torch.Tensor, *, name: str, priority: int = 0, average: bool = False,
                   op: Any = None) -> torch.futures.Future[torch.Tensor]:
        """Begin to reduce *tensor* in place, over all ranks; return a future of it.

        Do not use *tensor* until the future is done. All ranks give the same names, sizes and dtypes, each in its own
        order; rank 0's *priority* counts, the highest goes first. A *name* can be used again once its future is done.
        *op*: a `torch.distributed.ReduceOp`, by default SUM.

        Raises
        ------
        UnsupportedError
            If the tensor is sparse or not contiguous, integers are to be averaged, or *op* has parameters.
        BusyError
            If the last reduction of *name* is not done.
        ClosedError, PeerLostError, StallError, MismatchError
            If the schedule has failed or was closed.
        """
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise UnsupportedError(f"{name!r}, {tensor.layout} of shape {tuple(tensor.shape)} with strides "
                                   f"{tensor.stride() if tensor.layout == torch.strided else '-'}, is not contiguous")
        if average and (op is not None and op != dist.ReduceOp.SUM):
            raise UnsupportedError(f"{name!r}: only sums can be averaged, and op is {op!r}")
        if average and not (tensor.is_floating_point() or tensor.is_complex()):
            raise UnsupportedError(f"{name!r} is {tensor.dtype}: only floating point is averaged")
        op = dist.ReduceOp.SUM if op is None else op
        if not isinstance(op, dist.ReduceOp.RedOpType):
            raise UnsupportedError(f"{name!r}: op must be ReduceOp.SUM or another one of its kind, got {op!r}")
        flat = tensor.detach().view(-1)
        n_each = max(1, self._partition_nbytes // tensor.element_size())
        pieces = flat.split(n_each) if flat.numel() else (flat,)
        kind = (f"of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}, "
                f"{'average' if average else op.name.lower()}")
        with self._lock:
            if name in self._names:
                raise BusyError(f"{name!r} was given twice before its first sum was complete: wait for its future, or "
                                "use another name")
            self._names.add(name)

        def at_end(error: BaseException | None) -> BaseException | None:
            if error is None and average and self.size > 1:
                try:
                    tensor.detach().div_(self.size)
                except Exception as exc:
                    error = exc
            with self._lock:
                self._names.discard(name)
            return error

        whole = PartwiseFuture(tensor, len(pieces), at_end)
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        for part, piece in enumerate(pieces):
            entry = Entry(name=name, part=part, nbytes=piece.numel() * piece.element_size(), kind=kind)
            self._turns.submit(entry, partial(self._begin, piece, op, stream), whole.part_done, priority)
        return whole.future

    def _begin(self, piece: torch.Tensor, op: Any, stream: Any, finish: Finish) -> None:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():  # after the work that fills the tensor
            work = dist.all_reduce(piece, op, self._group, async_op=True)
        if stream is None:
            work.get_future().add_done_callback(lambda done: _finish(finish, done.value))
        else:
            threading.Thread(target=_finish, args=(finish, partial(_wait_for_card, work, stream.device)),
                             name="bpsfast-card", daemon=True).start()

    def close(self) -> None:
        """Wait for this rank's reductions (on rank 0: for all ranks'), and close. Call before destroy_process_group."""
        self._turns.close()


def bucket_hook(schedule, bucket):  # type: ignore[no-untyped-def]  # torch refuses names of classes as annotations
    """Average a bucket of DistributedDataParallel: `register_comm_hook(schedule, bucket_hook)`.

    The last bucket goes first, because the forward pass needs it first. Each model needs a schedule of its own, with
    another group than the model's, which uses its group for barriers and broadcasts.
    """
    index = bucket.index()
    return raising(schedule.all_reduce(bucket.buffer(), name=f"bucket {index}", priority=index, average=True))


def _finish(finish: Finish, result: Callable[[], Any]) -> None:
    """Call *finish* with the error that *result* raises, or with None."""
    try:
        result()
    except Exception as exc:
        finish(exc)
    else:
        finish(None)


def _wait_for_card(work: Any, device: Any) -> None:
    """Wait until the GPU has done *work*; torch's future is done when the work is enqueued."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        work.wait()
    stream.synchronize()


def _own_host() -> str:
    """Return the address at which other ranks reach this process: that on its route to the rendezvous, or its name."""
    master = os.environ.get("MASTER_ADDR", "")
    if not master:
        return socket.gethostname()
    if is_loopback(master):
        return master
    family, _, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return master if is_loopback(own) else own  # the rendezvous is on this machine, so its address leads here
