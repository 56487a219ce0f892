"""ProcessGroup: torch's collective calls, executed by a `collectives.Group` in the order of the calls.

A call checks its tensors, passes the work to the group's executor, and returns a `Work`.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from ...collectives.group import make_group
from ...orchestration.errors import BpsError, ConfigError, UnsupportedError
from . import torch_compat, worlds
from .base_group import BaseGroup
from .operands import (
    Operand,
    Reduction,
    all_reduce_sparse,
    check_number,
    check_same,
    combined,
    operand,
    operands,
    pieces,
    prepared,
    reducible,
    split,
    write,
)
from .torch_compat import overloads
from .work import Work, torch_error

Tensor = torch.Tensor
#: Executes a call, with the operands that it writes.
_Call = tuple[Callable[[], None], list[Operand]]


class ProcessGroup(BaseGroup):
    """A group of ranks, as `torch.distributed` makes it. Any thread; all members make the same calls in one order.

    Errors of a call are raised by its `Work`, as `DistBackendError` with bpsfast's own error as its cause; bad
    arguments at once. A group whose call has failed on a member cannot be used any more: destroy it.
    """

    # -- reductions ------------------------------------------------------------------------------------------------

    @overloads(dist.AllreduceOptions, {"tensors": 1},
           ({"tensors": 1}, "[op] [timeout]"), ({"tensors": 0}, "[op] [timeout]"), at_once=2)
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Combine all of *tensors* (usually one) and those of the other members; each becomes the result."""
        if len(tensors) < 2 or any(tensor.is_sparse for tensor in tensors):
            return self._all_reduced(tensors, opts)
        check_same(tensors, "all_reduce")
        reduction = torch_compat.reduction(opts)
        first, *others = each = operands(tensors)
        run = self._reductions([first], reduction)

        def run_all() -> None:
            write(first.dense.view(-1), combined([one.dense.view(-1) for one in each], reduction.op))
            run()
            for other in others:
                write(other.dense.view(-1), first.dense.view(-1))

        return self._start("all_reduce", tensors, opts, run_all, each)

    @overloads(dist.AllreduceCoalescedOptions, {"tensors": 1})
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Combine each of *tensors* with the other members', in place."""
        return self._all_reduced(tensors, opts)

    @overloads(dist.ReduceOptions, {"tensors": 1}, ({"tensors": 0}, "root [op] [timeout]"), at_once=2)
    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Combine the one of *tensors* into the root's; the other members' do not change."""
        reduction, root = torch_compat.reduction(opts), self._root(opts, "reduce")
        (one,) = operands(tensors)
        x = prepared(one.dense, reduction)
        out = reducible(one.dense, x.op)[0] if root == self.rank() else None
        return self._start("reduce", tensors, opts, lambda: self._group.reduce(x.made(), out, root, x.op), [one])

    @overloads(dist.ReduceScatterOptions, {"outputs": 1, "inputs": 2}, ({"outputs": 0, "inputs": 1}, "[op] [timeout]"),
           at_once=3)
    def reduce_scatter(self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Sequence[Tensor]],
                       opts: Any = None) -> Work:
        """Combine the i-th input of all members into the i-th member's output."""
        (output,), (inputs,) = output_tensors, input_tensors
        check_number(inputs, self.size(), "reduce_scatter")
        return self._start("reduce_scatter", [output], opts, *self._scattered(output, operands(inputs), opts))

    @overloads(dist.ReduceScatterOptions, {"outputs": 0, "inputs": 0}, at_once=3)
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """As `reduce_scatter`, with all inputs in one tensor."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    @overloads(dist.ReduceScatterOptions, {"outputs": 1, "inputs": 1})
    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor],
                                        opts: Any = None) -> Work:
        """`reduce_scatter_single` of each pair."""
        _check_pairs(outputs, inputs, "reduce_scatter")
        return self._start_all("reduce_scatter", outputs, opts, [
            self._scattered(output, operands(pieces(operand(input), output, self.size(), "reduce_scatter: the input")),
                            opts)
            for output, input in zip(outputs, inputs)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- copies ----------------------------------------------------------------------------------------------------

    @overloads(dist.BroadcastOptions, {"tensors": 1}, ({"tensors": 0}, "root [timeout]"), at_once=2)
    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Overwrite *tensors* (usually one) with the root's tensor that the options select."""
        each, root = operands(tensors), self._root(opts, "broadcast")
        check_same(tensors, "broadcast")
        if not 0 <= opts.rootTensor < len(each):
            raise ConfigError(f"broadcast: there is no tensor {opts.rootTensor} among the {len(each)} given")
        first = each[opts.rootTensor]

        def run() -> None:
            self._group.broadcast(first.memory, root)
            for other in each:
                if other is not first:
                    write(other.dense.view(-1), first.dense.view(-1))

        return self._start("broadcast", tensors, opts, run, each)

    @overloads(AllgatherOptions, {"outputs": 2, "inputs": 1}, ({"outputs": 1, "inputs": 0}, "[timeout]"), at_once=3)
    def allgather(self, output_tensors: Sequence[Sequence[Tensor]], input_tensors: Sequence[Tensor],
                  opts: Any = None) -> Work:
        """Put the i-th member's input into the i-th output, on all members.

        With several inputs there are as many lists of outputs, and each list gets all inputs, member by member.
        """
        n_inputs = len(input_tensors)
        _check_pairs(output_tensors, input_tensors, "all_gather")
        pairs = []
        for outputs in output_tensors:
            if len(outputs) != n_inputs * self.size():
                raise ConfigError(f"all_gather: {len(outputs)} outputs for {n_inputs} inputs of {self.size()} members")
            pairs += [(outputs[number::n_inputs], input) for number, input in enumerate(input_tensors)]
        return self._all_gathered(pairs, opts)

    @overloads(AllgatherOptions, {"outputs": 2, "inputs": 1})
    def allgather_coalesced(self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor],
                            opts: Any = None) -> Work:
        """`allgather` of each of *input_list*: ``output_lists[i][j]`` is the j-th of member i."""
        if len(output_lists) != self.size() or any(len(outputs) != len(input_list) for outputs in output_lists):
            raise ConfigError(f"all_gather_coalesced: {len(input_list)} inputs of {self.size()} members need as many "
                              f"lists of as many outputs, got {[len(outputs) for outputs in output_lists]}")
        return self._all_gathered(list(zip(zip(*output_lists), input_list)), opts)

    @overloads(AllgatherOptions, {"outputs": 0, "inputs": 0}, at_once=3)
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """As `allgather`, with all outputs in one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    @overloads(AllgatherOptions, {"outputs": 1, "inputs": 1})
    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor],
                                    opts: Any = None) -> Work:
        """`all_gather_single` of each pair."""
        _check_pairs(outputs, inputs, "all_gather")
        calls = []
        for whole, input in zip(operands(outputs), inputs):
            run, _ = self._gathered(pieces(whole, input, self.size(), "all_gather: the output"), input)
            calls.append((run, [whole]))
        return self._start_all("all_gather", outputs, opts, calls)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @overloads(dist.BarrierOptions, {}, ({}, "[timeout]"), at_once=1)
    def barrier(self, opts: Any = None) -> Work:
        """Wait for all members."""
        return self._start("barrier", [], opts, self._group.barrier)

    # -- messages --------------------------------------------------------------------------------------------------

    @overloads(dist.GatherOptions, {"outputs": 2, "inputs": 1}, ({"outputs": 1, "inputs": 0}, "root [timeout]"))
    def gather(self, output_tensors: Sequence[Sequence[Tensor]], input_tensors: Sequence[Tensor],
               opts: Any = None) -> Work:
        """Put the i-th member's input into the root's i-th output."""
        (input,), root = input_tensors, self._root(opts, "gather")
        outputs = list(output_tensors[0]) if root == self.rank() else []
        if root == self.rank():
            check_number(outputs, self.size(), "gather")
            check_same([input, *outputs], "gather")
        one, each = operand(input), operands(outputs)
        return self._start("gather", outputs, opts, lambda: self._group.gather(
            one.memory, [out.memory for out in each], root), each)

    @overloads(dist.GatherOptions, {"outputs": 0, "inputs": 0})
    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """As `gather`, with all outputs in one tensor."""
        root, whole, one = self._root(opts, "gather"), operand(output), operand(input)
        is_root = root == self.rank()
        each = operands(pieces(whole, input, self.size(), "gather: the output")) if is_root else []
        return self._start("gather", [output] if is_root else [], opts, lambda: self._group.gather(
            one.memory, [out.memory for out in each], root), [whole] if is_root else [])

    gather_into_tensor = gather_single

    def reconfigure(self, opts: Any) -> Work:
        """Raise DistBackendError: this group's members do not change. Use `ReplicaGroup` or `bpsfast.elastic`."""
        raise torch_error(UnsupportedError(
            "bpsfast's process groups keep their members: use bpsfast.torch.backend.ReplicaGroup, whose configure() "
            "makes it a group of other ranks, or bpsfast.elastic"))

    @overloads(dist.ScatterOptions, {"outputs": 1, "inputs": 2}, ({"outputs": 0, "inputs": 1}, "root [timeout]"))
    def scatter(self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Sequence[Tensor]],
                opts: Any = None) -> Work:
        """Put the root's i-th input into the i-th member's output."""
        (output,), root = output_tensors, self._root(opts, "scatter")
        inputs = list(input_tensors[0]) if root == self.rank() else []
        if root == self.rank():
            check_number(inputs, self.size(), "scatter")
            check_same([output, *inputs], "scatter")
        one, each = operand(output), operands(inputs)
        return self._start("scatter", [output], opts, lambda: self._group.scatter(
            [x.memory for x in each], one.memory, root), [one])

    @overloads(dist.AllToAllOptions, {"outputs": 1, "inputs": 1}, ({"outputs": 1, "inputs": 1}, "[timeout]"), at_once=3)
    def alltoall(self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Put this member's i-th input into the i-th member's output for this one. Sizes may differ."""
        check_number(input_tensors, self.size(), "all_to_all")
        check_number(output_tensors, self.size(), "all_to_all")
        outs, xs = operands(output_tensors), operands(input_tensors)
        return self._start("all_to_all", output_tensors, opts,
                           lambda: self._group.all_to_all([x.memory for x in xs], [out.memory for out in outs]), outs)

    @overloads(dist.AllToAllOptions, {"outputs": 0, "inputs": 0}, ({"outputs": 0, "inputs": 0}, "[timeout]"),
           needs=("output_splits", "input_splits"), at_once=5)
    def all_to_all_single(self, output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None,
                          input_split_sizes: Sequence[int] | None, opts: Any = None) -> Work:
        """As `alltoall`, with inputs and outputs in one tensor each, split along the first dimension."""
        whole = operand(output)
        outs = operands(split(whole.dense, output_split_sizes, self.size(), "output"))
        xs = operands(split(operand(input).dense, input_split_sizes, self.size(), "input"))
        return self._start("all_to_all", [output], opts,
                           lambda: self._group.all_to_all([x.memory for x in xs], [out.memory for out in outs]),
                           [whole])

    alltoall_base = all_to_all_single

    @overloads(None, {"tensors": 1}, needs=("peer",), accepts=("tag",), writes=())
    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Work:
        """Send the one of *tensors* to member *dstRank*."""
        (one,) = operands(tensors)
        self._check_peer(dstRank, "send")
        return self._message(lambda: self._messages.send(one, dstRank, tag))

    @overloads(None, {"tensors": 1}, needs=("peer",), accepts=("tag",), reads=())
    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Work:
        """Receive the one of *tensors* from member *srcRank*."""
        (one,) = operands(tensors)
        self._check_peer(srcRank, "recv")
        return self._message(lambda: self._messages.receive(one, srcRank, tag))

    @overloads(None, {"tensors": 1}, accepts=("tag",), reads=())
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Receive the one of *tensors* from any member that sends with *tag*."""
        (one,) = operands(tensors)
        return self._message(lambda: self._messages.receive(one, None, tag))

    @torch_compat.eager
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all members. The group stays usable if some are missing after *timeout*.

        Then all others raise DistBackendError that names the first missing member, or with *wait_all_ranks* all.
        """
        try:
            self._messages.barrier(
                timeout.total_seconds() if timeout is not None else self._group.timeout_s, wait_all_ranks)
        except BpsError as exc:
            raise torch_error(exc) from exc

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _start_all(self, text: str, results: Sequence[Tensor], opts: Any, calls: Sequence[_Call]) -> Work:
        """Start *calls* as one, whose results are *results*."""
        def run_all() -> None:
            for run, _ in calls:
                run()

        return self._start(text, results, opts, run_all, [one for _, written in calls for one in written])

    def _check_peer(self, member: int, what: str) -> None:
        if not 0 <= member < self.size() or member == self.rank():
            raise ConfigError(f"{what}: member {self.rank()} names member {member}, but must name another one of the "
                              f"{self.size()} members of the group")

    def _root(self, opts: Any, what: str) -> int:
        root = int(opts.rootRank)
        if not 0 <= root < self.size():
            raise ConfigError(f"{what}: the root is member {root}, but the group has members 0 to {self.size() - 1}")
        return root

    def _all_reduced(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        if not tensors:
            raise ConfigError("all_reduce: no tensor is given")
        reduction = torch_compat.reduction(opts)
        if all(tensor.is_sparse for tensor in tensors):
            return self._start_all("all_reduce", tensors, opts, [
                (partial(all_reduce_sparse, self._group, tensor, reduction.op), []) for tensor in tensors])
        each = operands(tensors)
        return self._start("all_reduce", tensors, opts, self._reductions(each, reduction), each)

    def _all_gathered(self, pairs: Sequence[tuple[Sequence[Tensor], Tensor]], opts: Any) -> Work:
        results = [tensor for outputs, _ in pairs for tensor in outputs]
        return self._start_all("all_gather", results, opts, [self._gathered(*pair) for pair in pairs])

    def _reductions(self, each: list[Operand], reduction: Reduction) -> Callable[[], None]:
        calls = [(prepared(one.dense, reduction), reducible(one.dense, reduction.op)[0]) for one in each]

        def run() -> None:
            for x, out in calls:
                self._group.all_reduce(x.made(), out, x.op)

        return run

    def _scattered(self, output: Tensor, inputs: Sequence[Operand], opts: Any) -> _Call:
        reduction = torch_compat.reduction(opts)
        one = operand(output)
        for x in inputs:
            if x.dense.dtype != output.dtype:
                raise ConfigError(f"reduce_scatter: output of {output.dtype} for an input of {x.dense.dtype}")
        if inputs[self.rank()].dense.numel() != output.numel():
            raise ConfigError(f"reduce_scatter: output of {output.numel()} elements for an input of "
                              f"{inputs[self.rank()].dense.numel()}")
        xs = [prepared(x.dense, reduction) for x in inputs]
        out = reducible(one.dense, reduction.op)[0]
        return lambda: self._group.reduce_scatter([x.made() for x in xs], out, xs[0].op), [one]

    def _gathered(self, outputs: Sequence[Tensor], input: Tensor) -> _Call:
        check_number(outputs, self.size(), "all_gather")
        each, one = operands(outputs), operand(input)
        for output in outputs:
            if output.dtype != input.dtype:
                raise ConfigError(f"all_gather: output of {output.dtype} for an input of {input.dtype}")
        if outputs[self.rank()].numel() * outputs[self.rank()].element_size() != one.memory.nbytes:
            check_same([input, outputs[self.rank()]], "all_gather")
        return lambda: self._group.all_gather(one.memory, [out.memory for out in each]), each


def _check_pairs(outputs: Sequence[Any], inputs: Sequence[Any], what: str) -> None:
    if len(outputs) != len(inputs):
        raise ConfigError(f"{what}: {len(outputs)} outputs for {len(inputs)} inputs")


def group_in(world: worlds.World, ranks: Sequence[int], rank: int, timeout_s: float) -> ProcessGroup:
    """Make the group of *ranks* of *world*, with this process as member *rank*; if that fails, the world is left."""
    try:
        group = make_group(world.session, [world.ranks.index(each) for each in ranks], timeout_s)
        made = ProcessGroup(world, group, rank, len(ranks))
        world.groups.add(made)
        return made
    except BaseException:
        worlds.quit(world)
        raise


def create(options: Any, _: Any = None) -> ProcessGroup:
    """Make a group from torch's *options* (`DistributedBackendOptions`); all its members call this, in one order.

    Raises DistBackendError if the job cannot start; the text names the missing rank, or what differs.
    """
    timeout_s = options.timeout.total_seconds()
    try:
        world = worlds.enter(options.store, options.group_rank, options.group_size, options.global_ranks_in_group,
                             timeout_s)
        made = group_in(world, options.global_ranks_in_group or range(options.group_size), options.group_rank,
                        timeout_s)
        made.store = options.store
        torch_compat.serve_builtin_hooks()
        return made
    except BpsError as exc:
        raise torch_error(exc) from exc


def monitored_barrier(group: dist.ProcessGroup | None = None, timeout: timedelta | None = None,
                      wait_all_ranks: bool = False) -> None:
    """As `torch.distributed.monitored_barrier`, for groups of bpsfast (None: the default one).

    Raises DistBackendError that names the first member that did not come within *timeout* (None: the group's), or, with
    *wait_all_ranks*, all such members; the group stays usable. Raises `ConfigError` if *group* is another backend's.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, ProcessGroup):
        raise ConfigError(f"monitored_barrier of bpsfast needs one of its groups, got {type(found).__name__}; "
                          "gloo has torch.distributed.monitored_barrier")
    found.monitored_barrier(timeout, wait_all_ranks)
