"""Which forward pass reads which parameters: learnt from calls, told before them."""
from __future__ import annotations

import gc

import torch
from torch.nn.modules import module as torch_modules

from bpsfast.torch.readers import Readers


class Outer(torch.nn.Module):
    """Calls `inner`; reads `silent`, whose forward pass is never called, itself."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.ones(3))
        self.inner = torch.nn.Linear(3, 3)
        self.silent = torch.nn.Sequential(torch.nn.Linear(3, 3))
        self.never = torch.nn.Linear(2, 2)

    def forward(self, x):
        return torch.nn.functional.linear(self.inner(x * self.own), self.silent[0].weight)


def learnt(parameters=None):
    model = Outer()
    readers = Readers(dict(model.named_parameters()) if parameters is None else parameters)
    model(torch.ones(1, 3))
    told = []
    return model, readers, told, readers.know(told.append)


def test_a_module_stands_for_what_is_not_called_inside_it():
    model, _readers, told, unread = learnt()
    assert unread == ()
    model(torch.ones(1, 3))
    assert told == [("own", "silent.0.weight", "silent.0.bias", "never.weight", "never.bias"),
                    ("inner.weight", "inner.bias")]


def test_the_state_of_any_part_is_read_too():
    model, _readers, told, _ = learnt()
    model.silent.state_dict()
    assert told == [("silent.0.weight", "silent.0.bias")]
    told.clear()
    model.state_dict()
    assert sorted(name for names in told for name in names) == sorted(dict(model.named_parameters()))


def test_what_no_called_module_holds_is_unread():
    other = torch.nn.Linear(1, 1)
    *_, unread = learnt(dict(other.named_parameters()))
    assert unread == ("weight", "bias")


def test_hooks_go_with_the_readers():
    before = len(torch_modules._global_forward_pre_hooks)
    model, readers, told, _ = learnt()
    assert len(torch_modules._global_forward_pre_hooks) == before
    unused = Readers(dict(model.named_parameters()))
    assert len(torch_modules._global_forward_pre_hooks) == before + 1
    del readers, unused
    gc.collect()
    model(torch.ones(1, 3))
    model.state_dict()
    assert told == [] and len(torch_modules._global_forward_pre_hooks) == before
