"""The forms of a call that torch's `ProcessGroup` takes: with options, or with op, root and timeout one by one.

torch binds each method in several forms, and libraries call all of them: ``allreduce([x], opts)``,
``allreduce(x, op)``, ``allgather([a, b], x)``. A method that is decorated here gets every one of them as its first:
tensors in lists as deep as the first form has them, then an options object.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .torch_compat import eager

#: What keywords call an argument, in one version of torch or another.
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


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _are_tensors(value: Any) -> bool:
    return _is_sequence(value) and all(isinstance(each, torch.Tensor) for each in value)


def _are_lists(value: Any) -> bool:
    return _is_sequence(value) and all(map(_are_tensors, value))


def _are_numbers(value: Any) -> bool:
    return value is None or (_is_sequence(value) and all(map(_is_number, value)))


#: How deep tensors lie in lists -> whether a value is such a list.
_DEEP: tuple[_Check, ...] = (_is_tensor, _are_tensors, _are_lists)
_CHECKS: dict[str, _Check] = {
    "op": lambda value: isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType),
    "root": _is_number,
    "timeout": lambda value: value is None or isinstance(value, timedelta | float),
    "tag": _is_number,
    "peer": _is_number,
    "output_splits": _are_numbers,
    "input_splits": _are_numbers,
}
_NUMBERS = ("root", "tag", "peer")
_WORDS = {"op": "ReduceOp", "root": "int", "timeout": "timedelta", "tag": "int", "peer": "int",
          "output_splits": "list of int", "input_splits": "list of int"}


class _Form:
    """One form: tensors by name and depth, what else is needed, and what may be left out."""

    def __init__(self, tensors: Mapping[str, int], needed: Sequence[str], optional: Sequence[str],
                 options: type | None) -> None:
        self.depths = dict(tensors)
        self.needed = (*tensors, *needed)
        self.optional = tuple(optional)
        self._names = (*self.needed, *self.optional)
        self._checks: dict[str, _Check] = {name: _DEEP[depth] for name, depth in tensors.items()}
        self._checks |= {name: _CHECKS[name] for name in (*needed, *optional) if name != "opts"}
        if options is not None and "opts" in optional:
            taken = (options, dist.AllreduceCoalescedOptions) if options is dist.AllreduceOptions else options
            self._checks["opts"] = lambda value: value is None or isinstance(value, taken)
        self._name_of = {alias: name for name in self._names for alias in (name, *_NAMES.get(name, ()))}

    def bind(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by name, None if this is not their form."""
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
        return found if all(self._checks[name](value) for name, value in found.items()) else None

    def __str__(self) -> str:
        kinds = ("Tensor", "list of Tensor", "list of lists of Tensor")
        said = [f"{name}: {kinds[self.depths[name]] if name in self.depths else _WORDS.get(name, 'options')}"
                for name in self._names]
        said[len(self.needed):] = [f"[{each}]" for each in said[len(self.needed):]]
        return f"({', '.join(said)})"


def forms(options: type | None, tensors: Mapping[str, int], *short: tuple[Mapping[str, int], str],
          needs: Sequence[str] = (), accepts: Sequence[str] = ("opts",)) -> Callable[[Callable[..., Any]],
                                                                                   Callable[..., Any]]:
    """Let a method of a group be called in all its forms; it gets the arguments of the first, positional.

    Parameters
    ----------
    options
        The class of the options; the method gets an object of it, last. None: it takes none.
    tensors
        Names of the arguments that are tensors, and in how deep lists they lie.
    short
        Further forms: the same tensors, perhaps less deep, and words for what follows; words in brackets are optional.
    needs, accepts
        What follows the tensors in the first form: by name, what has to be given, and what may be.

    The decorated method raises TypeError for what has none of these forms, as torch's own does.
    """
    first = _Form(tensors, needs, accepts, options)
    made = [first]
    for depths, words in short:
        names = words.split()
        made.append(_Form(depths, [*needs, *(name for name in names if name[0] != "[")],
                          [name.strip("[]") for name in names if name[0] == "["], None))

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            for form in made:
                found = form.bind(arguments, keywords)
                if found is not None:
                    return method(self, *_as_first(first, form, options, found))
            raise TypeError(f"{method.__name__}(): incompatible function arguments; it takes "
                            f"{' or '.join(map(str, made))}. Invoked with "
                            f"{', '.join([*map(_kind, arguments), *(f'{k}={_kind(v)}' for k, v in keywords.items())])}")

        return eager(call)

    return decorate


def _as_first(first: _Form, form: _Form, options: type | None, found: Mapping[str, Any]) -> list[Any]:
    """Return the arguments *found* in *form* as those of *first*."""
    found = {name: int(value) if name in _NUMBERS else value for name, value in found.items()}
    arguments = []
    for name in first.needed:
        value = found[name]
        if form.depths.get(name, 0) < first.depths.get(name, 0):
            value = [value]
        arguments.append(value)
    if options is None:
        return [*arguments, *(found[name] for name in first.optional if name in found)]
    opts = found.get("opts")
    if opts is None:
        opts = options()
        for name, field in _FIELDS.items():
            if found.get(name) is not None:
                value = found[name]
                setattr(opts, field, timedelta(seconds=value) if isinstance(value, float) else value)
    return [*arguments, opts]


def _kind(value: Any) -> str:
    if _is_sequence(value):
        return f"[{', '.join(map(_kind, value[:3]))}{', ...' if len(value) > 3 else ''}]"
    return type(value).__name__
