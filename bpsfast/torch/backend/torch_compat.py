"""Hides differences between versions of torch, and its C++ bindings: options, compiled code, overloads, built-in hooks.

torch binds each method of a process group in several overloads, and libraries call all of them:
``allreduce([x], opts)``, ``allreduce(x, op)``, ``allgather([a, b], x)``. A method decorated by `overloads` gets the
arguments of each of them in the form of the first: tensors in lists of the same depth, then an options object.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._dynamo import eval_frame

from ...orchestration.errors import UnsupportedError
from .device_calls import on_device
from .operands import Reduction

NAME = "bpsfast"
#: A class of Backend since torch 2.6, of ProcessGroup before.
BackendOptions: Any = getattr(_distributed_c10d.Backend, "Options", None) or vars(
    _distributed_c10d.ProcessGroup)["Options"]

#: torch's names of ops that `Group` knows in lower case.
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
#: In torch up to 2.6 a Work written in Python loses its Python half when only C++ refers to it; 2.13 keeps it.
LOSES_PYTHON_WORK = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8)


def reduction(options: Any) -> Reduction:
    """Return the ``reduceOp`` of *options* as a `Reduction`."""
    op = options.reduceOp
    kind = getattr(op, "op", op)
    name = getattr(kind, "name", str(kind).rpartition(".")[2])
    if name == "PREMUL_SUM":
        return Reduction("sum", op.__getstate__()[1])
    if name not in _OPS:
        raise UnsupportedError(f"ReduceOp.{name} is unknown; bpsfast combines by {', '.join(_OPS)} and PREMUL_SUM")
    return Reduction(name.lower())


def is_waited_for(options: Any) -> bool:
    """Whether the caller will wait at once; False if this version of torch does not tell."""
    return not getattr(options, "asyncOp", True)


def timeout_of(options: Any, default_s: float) -> float:
    """Return the timeout in *options* if there is one, else *default_s*; in seconds."""
    timeout = getattr(options, "timeout", None)
    if isinstance(timeout, timedelta) and timeout.total_seconds() > 0:
        return timeout.total_seconds()
    return default_s


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function* as one that `torch.compile` calls and does not trace: the graph breaks before it.

    `torch.compiler.disable` does the same, but imports the compiler, which takes seconds in every process.
    """

    call: Any = function
    if hasattr(eval_frame, "skip_code"):  # up to torch 2.6, which cannot skip what a function calls
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            callback = eval_frame.set_eval_frame(None)
            try:
                return function(*arguments, **keywords)
            finally:
                eval_frame.set_eval_frame(callback)

        eval_frame.skip_code(call.__code__)
    else:
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    call._torchdynamo_disable = True
    call._torchdynamo_disable_msg = "it talks to other processes"
    call._torchdynamo_disable_recursive = True
    return call


@functools.cache
def serve_builtin_hooks() -> None:
    """Make DistributedDataParallel over bpsfast's groups use torch's Python hook instead of the built-in FP16_COMPRESS.

    The built-in one needs a list of C++ tensors as its future's value, which a future made in Python never has.
    """
    module: Any = torch.nn.parallel.DistributedDataParallel
    builtin = getattr(module, "_register_builtin_comm_hook", None)
    if builtin is None:
        return

    @functools.wraps(builtin)
    def register(self: Any, comm_hook_type: Any) -> None:
        is_fp16 = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        if is_fp16 and dist.get_backend(self.process_group) == NAME:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            self.register_comm_hook(self.process_group, fp16_compress_hook)
        else:
            builtin(self, comm_hook_type)

    module._register_builtin_comm_hook = register


#: The keywords of an argument in the versions of torch.
_NAMES = {
    "tensors": ("tensor",),
    "outputs": ("output", "output_tensor", "output_tensors", "output_lists", "outputTensor", "outputTensors"),
    "inputs": ("input", "input_tensor", "input_tensors", "input_list", "inputTensor", "inputTensors"),
    "output_splits": ("output_split_sizes", "outputSplitSizes"),
    "input_splits": ("input_split_sizes", "inputSplitSizes"),
    "peer": ("dstRank", "srcRank"),
}
#: The field of the options that an argument of the short forms becomes.
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
_Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):  # gloo takes it, too
        return value.dim() == 0 and not (value.is_floating_point() or value.is_complex())
    return hasattr(value, "__index__")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_tensors(value: Any) -> bool:
    return _is_sequence(value) and all(isinstance(each, torch.Tensor) for each in value)


def _are_numbers(value: Any) -> bool:
    return value is None or (_is_sequence(value) and all(map(_is_number, value)))


#: By the depth of tensors in lists: a check of the value, and its type in error messages.
_TENSORS: tuple[tuple[_Check, str], ...] = (
    (lambda value: isinstance(value, torch.Tensor), "Tensor"),
    (_are_tensors, "list of Tensor"),
    (lambda value: _is_sequence(value) and all(map(_are_tensors, value)), "list of lists of Tensor"),
)
#: The same of other arguments.
_OTHERS: dict[str, tuple[_Check, str]] = {
    "op": (lambda value: isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType), "ReduceOp"),
    "root": (_is_number, "int"),
    "timeout": (lambda value: value is None or isinstance(value, timedelta | float), "timedelta"),
    "tag": (_is_number, "int"),
    "peer": (_is_number, "int"),
    "output_splits": (_are_numbers, "list of int"),
    "input_splits": (_are_numbers, "list of int"),
}

#: Checks of the types to which nothing has to be converted: of tensors by the depth of their lists, and of others.
_EXACT_TENSORS: tuple[_Check, ...] = (
    _TENSORS[0][0],
    lambda value: type(value) is list and _are_tensors(value),
    lambda value: type(value) is list and all(map(_are_tensors, value)),
)
_EXACT_OTHERS: dict[str, _Check] = {"tag": lambda value: type(value) is int, "peer": lambda value: type(value) is int,
                                    "output_splits": _are_numbers, "input_splits": _are_numbers}


def _never(_: Any) -> bool:
    return False


class _Overload:
    """One overload: its tensors by name and depth, other required arguments, and optional ones."""

    def __init__(self, tensors: Mapping[str, int], needed: Sequence[str], optional: Sequence[str],
                 options: type | None) -> None:
        self.depths = dict(tensors)
        self.needed = (*tensors, *needed)
        self.optional = tuple(optional)
        self._names = (*self.needed, *self.optional)
        self._kinds = {name: _TENSORS[depth] for name, depth in tensors.items()}
        self._kinds |= {name: _OTHERS[name] for name in (*needed, *optional) if name != "opts"}
        if options is not None and "opts" in optional:
            taken = (options, dist.AllreduceCoalescedOptions) if options is dist.AllreduceOptions else options
            self._kinds["opts"] = lambda value: value is None or isinstance(value, taken), "options"
        self._name_of = {alias: name for name in self._names for alias in (name, *_NAMES.get(name, ()))}
        self._exact = [_EXACT_TENSORS[tensors[name]] if name in tensors else
                       (lambda value: type(value) is options) if name == "opts" else _EXACT_OTHERS.get(name, _never)
                       for name in self._names]

    def fits(self, arguments: Sequence[Any]) -> bool:
        """Return whether *arguments* are all of this overload's, in the very types that torch's own functions pass."""
        return len(arguments) == len(self._exact) and all(check(value) for check, value in zip(self._exact, arguments))

    def bind(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by name, or None if they do not fit this overload."""
        if len(arguments) > len(self._names):
            return None
        found = dict(zip(self._names, arguments))
        for keyword, value in keywords.items():
            name = self._name_of.get(keyword)
            if name is None or name in found:
                return None
            found[name] = value
        if any(name not in found for name in self.needed):
            return None
        return found if all(self._kinds[name][0](value) for name, value in found.items()) else None

    def __str__(self) -> str:
        text = [f"{name}: {self._kinds[name][1]}" for name in self._names]
        n_needed = len(self.needed)
        return f"({', '.join([*text[:n_needed], *(f'[{each}]' for each in text[n_needed:])])})"


def overloads(options: type | None, tensors: Mapping[str, int], *short: tuple[Mapping[str, int], str],
              needs: Sequence[str] = (), accepts: Sequence[str] = ("opts",),
              reads: Sequence[str] = ("inputs", "tensors"), writes: Sequence[str] = ("outputs", "tensors"),
              at_once: int = 0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Accept all of torch's overloads of a method of a group, which gets the arguments of the first one, positional.

    Tensors may lie on devices (`device_calls.on_device`).

    Parameters
    ----------
    options
        The class of the options; the method gets an object of it, last. None: it takes none.
    tensors
        The arguments that are tensors, by name, and the depth of their lists.
    short
        Further overloads: the depths of the same tensors, and the names that follow; names in brackets are optional.
    needs, accepts
        The required and the optional arguments that follow the tensors in the first overload.
    reads, writes
        Which of the tensors the method reads, and which it writes.
    at_once
        The number of arguments with which a call may be made at once: what the group's `_at_once` has for the method is
        called first. If that returns True, it has made the call, and the method returns None, as torch allows where the
        options say that the caller waits. 0: never.

    For other arguments the decorated method raises TypeError, as torch's own does.
    """
    first = _Overload(tensors, needs, accepts, options)
    made = [first]
    for depths, words in short:
        names = words.split()
        made.append(_Overload(depths, [*needs, *(name for name in names if name[0] != "[")],
                          [name.strip("[]") for name in names if name[0] == "["], None))

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        numbers = [tuple(i for i, name in enumerate(tensors) if name in names) for names in (reads, writes)]
        staged = on_device(*numbers)(method)
        name = method.__name__

        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if at_once:
                if len(keywords) == 1 and type(keywords.get("opts")) is options:  # as torch calls barrier
                    arguments, keywords = (*arguments, keywords["opts"]), {}
                if len(arguments) == at_once and not keywords:
                    shortest = self._at_once.get(name)
                    if shortest is not None and shortest(*arguments):
                        return None
            if not keywords and first.fits(arguments):
                return staged(self, *arguments)
            for form in made:
                found = form.bind(arguments, keywords)
                if found is not None:
                    return staged(self, *_as_first_overload(first, form, options, found))
            raise TypeError(f"{method.__name__}(): incompatible function arguments; it takes "
                            f"{' or '.join(map(str, made))}. Invoked with "
                            f"{', '.join([*map(_kind, arguments), *(f'{k}={_kind(v)}' for k, v in keywords.items())])}")

        return eager(call)

    return decorate


def _as_first_overload(first: _Overload, form: _Overload, options: type | None, found: Mapping[str, Any]) -> list[Any]:
    """Convert the arguments *found* of the overload *form* to those of *first*."""
    found = {name: int(value) if name in ("root", "tag", "peer") else value for name, value in found.items()}
    arguments = [[found[name]] if form.depths.get(name, 0) < first.depths.get(name, 0) else found[name]
                 for name in first.needed]
    if options is None:
        return [*arguments, *(found[name] for name in first.optional if name in found)]
    opts = found.get("opts")
    if opts is None:
        opts = options()
        for name, field in _FIELDS.items():
            value = found.get(name)
            if value is not None:
                setattr(opts, field, timedelta(seconds=value) if isinstance(value, float) else value)
    return [*arguments, opts]


def _kind(value: Any) -> str:
    if _is_sequence(value):
        return f"[{', '.join(map(_kind, value[:3]))}{', ...' if len(value) > 3 else ''}]"
    return type(value).__name__
