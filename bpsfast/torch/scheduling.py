"""All-reduces of a torch process group (gloo, NCCL, ...) by urgency, in one order on all ranks.

    schedule = bpsfast.torch.schedule()                  # on every rank of the group
    future = schedule.all_reduce(gradient, name="conv1.weight", priority=-layer)
    future.wait()
    model.register_comm_hook(schedule, bucket_hook)      # or: buckets of DistributedDataParallel

Each tensor is cut into partitions, so something urgent overtakes what is large and has begun; only so many bytes are
under way as there is credit. Source: ByteScheduler (SOSP'19) sections 3 and 4.
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
from ..base.settings import load_with_origins
from ..collectives.turn_service import Finish, TurnService
from ..orchestration.errors import BusyError, ConfigError, UnsupportedError
from ..orchestration.priority.turns import Entry
from ..orchestration.security import job_key

_PARTITION_NBYTES = 4 << 20
_CREDIT_NBYTES = 16 << 20


def schedule(group: dist.ProcessGroup | None = None, *, partition_nbytes: int = _PARTITION_NBYTES,
             credit_nbytes: int = _CREDIT_NBYTES, timeout_s: float = 300.0) -> Schedule:
    """Return what sums over *group* (None: all ranks) by urgency. Collective: every rank of the group calls it.

    From then on nobody else may begin anything of *group*, not even a barrier: give it a group of its own
    (`dist.new_group`) where other code uses the default one.

    Parameters
    ----------
    partition_nbytes, credit_nbytes
        What tensors are cut into, and what may be under way at a time; rank 0's credit counts.
    timeout_s
        How long nothing may happen while something is to be done.

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


class Schedule:
    """See `schedule`. Any thread."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, partition_nbytes: int, credit_nbytes: int,
                 timeout_s: float) -> None:
        self._group = group
        self._partition_nbytes = partition_nbytes
        self.size = dist.get_world_size(group)
        self._lock = threading.Lock()
        self._names: set[str] = set()  # under way: a part of the old round may be done when others are not
        self._turns = TurnService(rank, self.size, self._agree, host=_own_host, credit_nbytes=credit_nbytes,
                                  timeout_s=timeout_s, secret=_secret())

    def _agree(self, said: bytes | None) -> bytes:
        box: list[Any] = [said]
        first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        dist.broadcast_object_list(box, src=first, group=self._group)
        return bytes(box[0])

    def all_reduce(self, tensor: torch.Tensor, *, name: str, priority: int = 0, average: bool = False,
                   op: Any = None) -> torch.futures.Future[torch.Tensor]:
        """Begin to reduce *tensor* in place, over all ranks; the future has it, or an error.

        *tensor* must not be touched until then. All ranks give the same *name*, size and dtype, each in its own order;
        rank 0's *priority* counts, the highest goes first. A name can be used again once its future is done. *op*: a
        `torch.distributed.ReduceOp`, by default SUM.

        Raises
        ------
        UnsupportedError
            If the tensor is sparse or not contiguous, integers are to be averaged, or *op* has parameters.
        BusyError
            If the name is under way.
        ClosedError, PeerLostError, StallError, MismatchError
            If nothing more can be begun.
        """
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise UnsupportedError(f"{name!r}, {tensor.layout} of shape {tuple(tensor.shape)} with strides "
                                   f"{tensor.stride() if tensor.layout == torch.strided else '-'}, is not contiguous")
        if average and (op is not None and op != dist.ReduceOp.SUM):
            raise UnsupportedError(f"{name!r}: an average is a sum's, and op is {op!r}")
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
                raise BusyError(f"{name!r} was given twice before its first sum was there: wait for its future, or "
                                "take another name")
            self._names.add(name)
        whole = _PartitionedReduction(tensor, len(pieces), self.size if average else 1, partial(self._forget, name))
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        for part, piece in enumerate(pieces):
            entry = Entry(name=name, part=part, nbytes=piece.numel() * piece.element_size(), kind=kind)
            self._turns.submit(entry, partial(self._begin, piece, op, stream), whole.done, priority)
        return whole.future

    def _forget(self, name: str) -> None:
        with self._lock:
            self._names.discard(name)

    def _begin(self, piece: torch.Tensor, op: Any, stream: Any, finish: Finish) -> None:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():  # what makes the tensor comes first
            work = dist.all_reduce(piece, op, self._group, async_op=True)
        if stream is None:
            work.get_future().add_done_callback(partial(_tell, finish))
        else:
            threading.Thread(
                target=_await, args=(work, stream.device, finish), name="bpsfast-card", daemon=True).start()

    def close(self) -> None:
        """Wait until this rank has what it gave (rank 0: until all have), and close. Before destroy_process_group."""
        self._turns.close()

    def __enter__(self) -> Schedule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bucket_hook(schedule, bucket):  # type: ignore[no-untyped-def]  # torch refuses names of classes as annotations
    """Average a bucket of DistributedDataParallel: `register_comm_hook(schedule, bucket_hook)`.

    The last bucket holds what the forward pass needs first: it goes first. One model a schedule, whose group is not the
    model's own: that one has barriers and the like.
    """
    index = bucket.index()
    future = schedule.all_reduce(bucket.buffer(), name=f"bucket {index}", priority=index, average=True)
    # An error that Python has set is a value to the reducer's C++, which takes it for a tensor; one raised here is not.
    return future.then(lambda done: done.value())


class _PartitionedReduction:
    """A tensor whose *n_parts* are reduced one by one; *on_end* is called just before its future is done."""

    def __init__(self, tensor: torch.Tensor, n_parts: int, divisor: int, on_end: Callable[[], None]) -> None:
        devices: list[Any] = [tensor.device] if tensor.is_cuda else []
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._tensor = tensor
        self._n_left = n_parts
        self._divisor = divisor
        self._on_end = on_end

    def done(self, error: BaseException | None) -> None:
        """Note the end of one part; always called from one thread."""
        if self._n_left == 0:
            return
        self._n_left = self._n_left - 1 if error is None else 0
        if self._n_left:
            return
        if error is None and self._divisor > 1:
            try:
                self._tensor.detach().div_(self._divisor)
            except Exception as exc:
                error = exc
        self._on_end()
        if error is None:
            self.future.set_result(self._tensor)
        else:
            self.future.set_exception(error)  # type: ignore[arg-type]  # torch's hint is wrong


def _tell(finish: Finish, done: Any) -> None:
    """Say how a future of torch's has ended."""
    try:
        done.value()
    except Exception as exc:
        finish(exc)
    else:
        finish(None)


def _await(work: Any, device: Any, finish: Finish) -> None:
    """Wait until the card has done *work*; its future is done when it is queued."""
    try:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            work.wait()
        stream.synchronize()
    except Exception as exc:
        finish(exc)
    else:
        finish(None)


def _secret() -> bytes:
    """Return the job's key, if this rank was given one: torch's group is encrypted by nobody."""
    given = given_key(load_with_origins()[0])
    return job_key(given, "") if given else b""


def _own_host() -> str:
    """Return where other ranks reach this process: the address from which it reaches the rendezvous, or its name."""
    master = os.environ.get("MASTER_ADDR", "")
    if not master:
        return socket.gethostname()
    if is_loopback(master):
        return master
    family, _, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return master if is_loopback(own) else own  # the rendezvous is on this machine: the others came there by its name
