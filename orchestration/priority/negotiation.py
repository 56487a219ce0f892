"""Negotiates which named operations a set of ranks executes next, where each rank asks in an order of its own.

Every rank sends its requests to the first rank of the set. Once all ranks have asked for a name, or have joined (they
have no more data), it is decided, and all ranks execute what was decided in one order. If ranks disagree, all of them
get an error; requests for other names go on. Source: Horovod's controller (controller.cc, `ComputeResponseList` and
`ConstructResponse`), without its response cache and its cycles. The decisions are pure; `listen` and `connect` are not.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import msgspec

from ..errors import BpsError, PeerLostError, StallError
from .group_channel import (
    Failed as Failed,
    FollowerChannel as FollowerChannel,
    Hello as Hello,
    LeaderChannel as LeaderChannel,
    Left as Left,
)

Kind = Literal["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join",
               "add_process_set", "remove_process_set"]

#: The kinds in which ranks that have joined take part: the others can do these for them.
_WITH_JOINED = ("allreduce", "barrier")
#: Names that a warning gives for each missing rank.
_N_NAMES = 6


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: its own name (for messages only), dtype and shape; `shape` None: as the root's."""

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; 0 while the shape is unknown."""
        return 0 if self.shape is None else self.itemsize * prod(self.shape)


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What job rank *rank* asks for under *name*. Several `specs`: a group, executed as a whole or not at all.

    `op`: of a reduction; `root`: a job rank; `splits`: of alltoall, first-dimension counts in set order; `ranks`: of
    the process set that is added or removed; `is_patient`: of join, which then has no deadline; `n_steps`: of join, the
    number of optimizers' steps, which are not asked for here, in which this rank has taken part since the last one.
    """

    rank: int
    name: str
    kind: Kind
    specs: tuple[Spec, ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    is_patient: bool = False
    n_steps: int = 0


class Response(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all ranks execute next: one name, or several allreduces as one.

    `specs`: the tensors of each name. `counts`: of allgather, of each tensor the first dimension on each rank; of
    alltoall, the splits of each rank. `error`: why it is not executed, in words.
    """

    kind: Kind
    names: tuple[str, ...]
    specs: tuple[tuple[Spec, ...], ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    counts: tuple[tuple[int, ...], ...] = ()
    ranks: tuple[int, ...] = ()
    last_joined: int = -1
    error: str = ""


class _Pending:
    """A name that not all ranks have asked for."""

    def __init__(self, now: float) -> None:
        self.by_rank: dict[int, Request] = {}
        self.since = now


class Coordinator:
    """Decides for the set of job ranks *ranks*. One thread at a time; *now* is any clock, in seconds.

    *fusion_nbytes*: allreduces that follow each other and differ in name and shape only are executed as one up to this
    size. *warn_s*: how long a name may wait before `warning` tells of it; 0: never. Again at doubling intervals.
    *timeout_s*: how long a name may wait before the set fails.
    """

    def __init__(self, ranks: Sequence[int], fusion_nbytes: int, warn_s: float, timeout_s: float) -> None:
        self._ranks = tuple(ranks)
        self._fusion_nbytes = fusion_nbytes
        self._warn_s, self._timeout_s = warn_s, timeout_s
        self._pending: dict[str, _Pending] = {}
        self._decided: list[Response] = []
        self._joined: dict[int, Request] = {}
        self._heard = 0.0  # when a request came last
        self._told: dict[str, float] = {}  # name -> how long it had waited when `warning` told of it
        self._left: int | None = None
        #: Why nothing is decided any more, or None.
        self.failure: BpsError | None = None

    def submit(self, request: Request, now: float) -> None:
        """Note a request. Each rank asks for a name again only after the last response to it."""
        self._heard = now
        if self.failure is not None:
            return
        if self._left is not None:
            self._fail_by_leaving(self._left, [request.name])
            return
        if request.kind == "join":
            self._joined[request.rank] = request
            for name in list(self._pending):
                self._decide(name)
            if len(self._joined) == len(self._ranks):
                self._decided.append(Response(kind="join", names=(request.name,), last_joined=self._last_joined()))
                self._joined.clear()
            return
        self._pending.setdefault(request.name, _Pending(now)).by_rank[request.rank] = request
        self._decide(request.name)

    def _last_joined(self) -> int:
        """Return the rank that joined last: that of most steps, of several the one that was heard last.

        Requests may be overtaken: a rank that has joined takes part in others' steps at once, and these end without us.
        """
        heard = list(enumerate(self._joined.values()))
        return max(heard, key=lambda each: (each[1].n_steps, each[0]))[1].rank

    def leave(self, rank: int) -> None:
        """Note that *rank* takes part no more: what is not decided yet fails, also if it has asked for that itself."""
        pending = [*self._pending, *(["join"] if self._joined else [])]
        if pending:
            self._fail_by_leaving(rank, pending)
        elif self._left is None:
            self._left = rank

    def responses(self) -> list[Response]:
        """Take what was decided, in the order in which all ranks execute it."""
        decided, self._decided = self._decided, []
        runs: list[list[Response]] = []
        dtypes: set[str] = set()  # of the last run, with what there is in it
        nbytes = 0
        for response in decided:
            tensors = [spec for specs in response.specs for spec in specs]
            own, own_nbytes = {spec.dtype for spec in tensors}, sum(spec.nbytes for spec in tensors)
            if (runs and _are_alike(runs[-1][0], response) and len(dtypes | own) <= 1
                    and nbytes + own_nbytes <= self._fusion_nbytes):
                runs[-1].append(response)
                dtypes, nbytes = dtypes | own, nbytes + own_nbytes
            else:
                runs.append([response])
                dtypes, nbytes = own, own_nbytes
        return [_as_one(run) for run in runs]

    def warning(self, now: float) -> str | None:
        """Return the warning that is due now, in Horovod's words; None: none."""
        late = [name for name, pending in self._pending.items()
                if self._warn_s and now - pending.since >= max(self._warn_s, 2 * self._told.get(name, 0.0))]
        if not late:
            return None
        for name in late:
            self._told[name] = now - self._pending[name].since
        lines = "".join(f"\n{each}" for each in self._missing(late))
        return ("One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
                f"waiting for remainder of ranks for more than {self._warn_s:g} seconds. This may indicate that "
                "different ranks are trying to submit different tensors or that only subset of ranks is submitting "
                f"tensors, which will cause deadlock. Stage negotiation, in the set of {len(self._ranks)} ranks that "
                f"begins with rank {self._ranks[0]}.\nMissing ranks:{lines}")

    def check_timeouts(self, now: float) -> None:
        """Fail with a `StallError` that names who is missing, if something has waited too long."""
        late = [name for name, pending in self._pending.items() if now - pending.since > self._timeout_s]
        if late:
            self._fail(StallError(
                f"{_some(late)} waited {now - self._pending[late[0]].since:.3g} s (timeout_s = {self._timeout_s:g}) "
                f"for ranks that have not submitted it; missing ranks: {'; '.join(self._missing(late))}"))
        elif self._joined and now - self._heard > self._timeout_s and not any(
                request.is_patient for request in self._joined.values()):
            absent = [rank for rank in self._ranks if rank not in self._joined]
            self._fail(StallError(f"ranks {sorted(self._joined)} have joined, and nothing came from ranks {absent} for "
                                  f"{now - self._heard:.3g} s (timeout_s = {self._timeout_s:g})"))

    def _missing(self, names: Sequence[str]) -> list[str]:
        """Return "rank: [names]" for each rank that has not asked for some of *names*."""
        absent = {rank: [name for name in names if rank not in self._pending[name].by_rank]
                  for rank in self._ranks if rank not in self._joined}
        return [f"{rank}: [{_some(each)}]" for rank, each in absent.items() if each]

    def _fail(self, error: BpsError) -> None:
        self.failure = self.failure or error
        self._pending.clear()

    def _fail_by_leaving(self, rank: int, names: Sequence[str]) -> None:
        self._fail(PeerLostError(
            "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to "
            "allreduce, allgather or broadcast a tensor after one of the ranks finished execution: rank "
            f"{rank} has left, and takes no part in {_some(names)}."))

    def _decide(self, name: str) -> None:
        """Answer *name* if all ranks that will ask for it have."""
        requests = self._pending[name].by_rank
        if any(rank not in requests and rank not in self._joined for rank in self._ranks):
            return
        del self._pending[name]
        self._told.pop(name, None)
        in_order = [requests[rank] for rank in self._ranks if rank in requests]
        first = in_order[0]
        error = disagreement(in_order)
        if not error and len(in_order) < len(self._ranks) and first.kind not in _WITH_JOINED:
            error = _not_with_join(first.kind)
        if error:
            self._decided.append(Response(kind=first.kind, names=(name,), error=error))
            return
        specs = first.specs
        counts: tuple[tuple[int, ...], ...] = ()
        if first.kind == "broadcast":
            specs = next((each.specs for each in in_order if each.rank == each.root), specs)
        elif first.kind == "allgather":
            counts = tuple(tuple(each.specs[i].shape[0] for each in in_order)  # type: ignore[index]
                           for i in range(len(specs)))
        elif first.kind == "alltoall":
            counts = tuple(each.splits for each in in_order)
        self._decided.append(Response(
            kind=first.kind, names=(name,), specs=(specs,), op=first.op, prescale=first.prescale,
            postscale=first.postscale, root=first.root, counts=counts, ranks=first.ranks))


def _are_alike(a: Response, b: Response) -> bool:
    """Whether both are allreduces of one kind, which can be executed as one if their tensors can."""
    return (a.kind == b.kind == "allreduce" and not a.error and not b.error
            and (a.op, a.prescale, a.postscale) == (b.op, b.prescale, b.postscale))


def _as_one(run: list[Response]) -> Response:
    """Return a run of allreduces as one; any other response is a run of its own."""
    if len(run) == 1:
        return run[0]
    return msgspec.structs.replace(run[0], names=tuple(name for each in run for name in each.names),
                                   specs=tuple(specs for each in run for specs in each.specs))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_N_NAMES]) + (" ..." if len(names) > _N_NAMES else "")


def _not_with_join(kind: Kind) -> str:
    hint = " Specify sparse_as_dense=True if using DistributedOptimizer" if kind == "allgather" else ""
    return f"{kind.capitalize()} is not supported with Join at this time.{hint}"


_SAME_SHAPE = ("allreduce", "broadcast", "reducescatter")
_SAME_BUT_ROWS = ("allgather", "alltoall")


def disagreement(requests: Sequence[Request]) -> str:
    """Return how *requests* for one name (of different ranks, at least one) contradict each other; "": not at all.

    The words are Horovod's, which people search for, then the ranks that differ. Source: what `ConstructResponse`
    (controller.cc) compares, in its order.
    """
    first = requests[0]
    for other in requests[1:]:
        text = _difference(first, other)
        if text:
            return f"{text} ({first.name}: ranks {first.rank} and {other.rank})"
    for spec in first.specs:
        if first.kind in ("allgather", "alltoall", "reducescatter") and not spec.shape:
            return f"Process-set rank zero tried to {first.kind.upper()} a rank-zero tensor. ({first.name})"
    return ""


def _difference(a: Request, b: Request) -> str:
    """Return the first difference of two requests that must be alike."""
    what = a.kind.upper()
    if a.kind != b.kind:
        return _mismatch("operations", "did an", what, b.kind.upper())
    if len(a.specs) != len(b.specs):
        return _mismatch(f"{what} group sizes", "sent a group of", f"{len(a.specs)} tensors",
                         f"{len(b.specs)} tensors") + _odd_one(a, b)
    for ours, theirs in zip(a.specs, b.specs):
        which = f" Tensor {ours.name}." if len(a.specs) > 1 else ""
        if ours.name != theirs.name:
            return _mismatch(f"{what} tensor names", "sent", ours.name, theirs.name)
        if ours.dtype != theirs.dtype:
            return _mismatch("data types", "had type", ours.dtype, theirs.dtype) + which
        text = _shapes(a.kind, ours.shape, theirs.shape)
        if text:
            return f"Mismatched {what} tensor shapes: {text}{which}"
    if (a.prescale, a.postscale) != (b.prescale, b.postscale):
        return _mismatch("prescale and/or postscale factors", "sent factors",
                         *(f"({each.prescale:g}, {each.postscale:g})" for each in (a, b)))
    if a.op != b.op:
        return _mismatch("reduction operation", "sent reduction op", a.op, b.op)
    if a.root != b.root:
        return _mismatch(f"{what} root ranks", "specified root rank", a.root, b.root)
    if a.ranks != b.ranks:
        return _mismatch("process sets", "named ranks", _list(a.ranks), _list(b.ranks))
    return ""


def _mismatch(what: str, did: str, ours: object, theirs: object) -> str:
    return f"Mismatched {what}: One rank {did} {ours}, but another rank {did} {theirs}."


def _odd_one(a: Request, b: Request) -> str:
    """Name the first tensor that only one of them has."""
    ours, theirs = ({spec.name: None for spec in each.specs} for each in (a, b))
    odd = next((name for name in (*ours, *theirs) if (name in ours) != (name in theirs)), "")
    return f" Only one of them sent {odd}." if odd else ""


def _shapes(kind: str, ours: tuple[int, ...] | None, theirs: tuple[int, ...] | None) -> str:
    if ours is None or theirs is None or ours == theirs:
        return ""
    if kind in _SAME_SHAPE:
        return (f"One rank sent a tensor of shape {_list(ours)}, but another rank sent a tensor of shape "
                f"{_list(theirs)}.")
    if kind in _SAME_BUT_ROWS and len(ours) != len(theirs):
        return f"One rank sent a tensor of rank {len(ours)}, but another rank sent a tensor of rank {len(theirs)}."
    for dim, (one, another) in enumerate(zip(ours, theirs)):
        if dim and one != another:
            return (f"One rank sent a tensor with dimension {dim} equal to {one}, but another rank sent a tensor with "
                    f"dimension {dim} equal to {another}.")
    return ""


def _list(values: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, values))}]"


class Requests(msgspec.Struct, tag=True, frozen=True):
    """A follower's requests."""

    requests: tuple[Request, ...]


class Responses(msgspec.Struct, tag=True, frozen=True):
    """The first rank tells what all execute next, in this order."""

    responses: tuple[Response, ...]


Message = Hello | Requests | Responses | Failed | Left
_decoder = msgspec.msgpack.Decoder(Message)


def listen(key: bytes, host: str, ports: tuple[int, int] = (0, 0), n_followers: int = 0) -> LeaderChannel:
    """Return the first rank's end, for ranks that connect to *host*; the rest as for `LeaderChannel`."""
    return LeaderChannel(key, host, _decoder, ports, n_followers)


def connect(host: str, port: int, key: bytes, leader: str) -> FollowerChannel:
    """Return another rank's end; *leader* and errors as `FollowerChannel`."""
    return FollowerChannel(host, port, key, _decoder, leader)
