"""Which module's forward pass reads which parameters: learnt from one iteration, then told before each.

A parameter belongs to the module that holds it, but that one need not be called: `torch.nn.MultiheadAttention` reads
the weights of its output layer itself. Then the nearest module around it that is called stands for it.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

#: Called with the names of parameters that are about to be read.
Before = Callable[[tuple[str, ...]], None]


class Readers:
    """Watches all modules of this process until `know`. One thread; goes away with its last reference.

    Parameters
    ----------
    parameters
        Name -> parameter, of those that matter.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._called: dict[torch.nn.Module, None] = {}
        me = weakref.ref(self)

        def saw(module: torch.nn.Module, _: Any) -> None:
            readers = me()
            if readers is not None:
                readers._saw(module)

        self._handles: list[Any] = [register_module_forward_pre_hook(saw)]
        weakref.finalize(self, _remove, self._handles)

    def _saw(self, module: torch.nn.Module) -> None:
        if module not in self._called and any(id(parameter) in self._names for parameter in module.parameters()):
            self._called[module] = None

    def know(self, before: Before) -> tuple[str, ...]:
        """End the learning; from now on *before* is called ahead of what reads parameters. Return names nobody reads.

        That is the forward pass of the module that stands for them, ahead of its other hooks, and `state_dict` of the
        one that holds them. *before* is held as long as this object lives.
        """
        _remove(self._handles)
        found: set[str] = set()
        for module in self._called:
            read: list[str] = []
            for holder in self._stands_for(module):
                own = self._held(holder)
                if own:
                    read += own
                    self._handles.append(holder.register_state_dict_pre_hook(_telling(before, own)))
            if read:
                names = tuple(dict.fromkeys(read))
                self._handles.append(module.register_forward_pre_hook(_telling(before, names), prepend=True))
                found.update(names)
        self._called.clear()
        return tuple(name for name in self._names.values() if name not in found)

    def _stands_for(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Yield *module* and those in it that no forward pass of their own is known of."""
        yield module
        for child in module.children():
            if child not in self._called:
                yield from self._stands_for(child)

    def _held(self, module: torch.nn.Module) -> tuple[str, ...]:
        held = module.parameters(recurse=False)
        return tuple(self._names[id(parameter)] for parameter in held if id(parameter) in self._names)


def _telling(before: Before, names: tuple[str, ...]) -> Callable[..., None]:
    def tell(*_: Any) -> None:
        before(names)

    return tell


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
