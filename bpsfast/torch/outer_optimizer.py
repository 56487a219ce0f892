"""OuterOptimizer: many local steps, then one step of all ranks together, whose momentum the owners keep (DiLoCo).

After every `sync_every` steps of the user's optimizer each rank pushes the difference between the outer weights and its
parameters. The owners average the differences, make a step with Nesterov momentum, and answer with the new outer
weights (Douillard et al., arXiv 2311.08105). Parameters may be exchanged in fragments, each at steps of its own, and
are trained while their exchange is under way (Streaming DiLoCo, arXiv 2501.18512).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

from ..orchestration.errors import ConfigError, MismatchError, UnsupportedError
from ..orchestration.store import StoreSpec, check
from ..trainer import process
from ..trainer.async_weights import StoredTensor
from .gradient_hooks import Named
from .ops import wire_dtype_name
from .optimizer_wrapper import derive, local_step, trained_parameters


class Outer:
    """Makes the outer steps of one optimizer's *named* parameters, on all ranks alike. The optimizer owns it."""

    def __init__(self, named: list[Named], spec: StoreSpec, sync_every: int, n_fragments: int, overlap: int, mix: float,
                 root_rank: int) -> None:
        self._every, self._overlap, self._mix, self._root = sync_every, overlap, mix, root_rank
        self.parameters = dict(named)
        self.n_steps = 0
        prefix = process.current().tensors.unnamed("OuterStep")
        runs = split_parameters(named, n_fragments)
        self.fragments = [
            Fragment(f"{prefix}.{number}" + (".double" if is_double else ""), list(alike), spec,
                     number * sync_every // len(runs), -number)
            for number, run in enumerate(runs)
            for is_double, alike in groupby(sorted(run, key=_is_double), key=_is_double)]
        for fragment in self.fragments:
            fragment.start_seed(root_rank)
        for fragment in self.fragments:
            fragment.seed(root_rank)

    def after_step(self) -> None:
        """Count an inner step; send the fragments, and take over the answers, that are due."""
        self.n_steps += 1
        for fragment in self.fragments:
            if self.n_steps % self._every == fragment.offset:
                fragment.send(self.n_steps + self._overlap)
        for fragment in self.fragments:
            if fragment.due == self.n_steps:
                fragment.take_over(self._mix if self._overlap else 0.0)

    def state(self) -> dict[str, Any]:
        """Return what a later job needs to continue with the same bits; all ranks call it together."""
        return {"n_steps": self.n_steps, "sync_every": self._every, "overlap": self._overlap,
                "fragments": [fragment.state() for fragment in self.fragments]}

    def check(self, state: dict[str, Any]) -> None:
        """Raise `MismatchError` if a saved *state* is of other parameters, fragments or numbers of steps."""
        if set(state) != {"n_steps", "sync_every", "overlap", "fragments"}:
            raise MismatchError(f"the saved state has {sorted(state)} of outer steps, not what OuterOptimizer saves")
        ours = {"sync_every": self._every, "overlap": self._overlap}
        for name, value in ours.items():
            if state[name] != value:
                raise MismatchError(f"the saved state has {name}={state[name]}, this optimizer {value}: outer steps "
                                    "would come at other times")
        if len(state["fragments"]) != len(self.fragments):
            raise MismatchError(f"the saved state has {len(state['fragments'])} fragments, this optimizer "
                                f"{len(self.fragments)}: use the same n_fragments and parameters")
        for fragment, saved in zip(self.fragments, state["fragments"]):
            fragment.check(saved)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned and `check` accepts; all ranks call it together."""
        pairs = list(zip(self.fragments, state["fragments"]))
        for fragment, saved in pairs:
            fragment.start_anew(saved, self._root)
        for fragment, saved in pairs:
            fragment.load(saved, self._root)
        self.n_steps = state["n_steps"]


class _OuterOptimizer(torch.optim.Optimizer):
    """The methods that `OuterOptimizer` adds to the user's optimizer class."""

    _base: type[torch.optim.Optimizer]
    _outer: Outer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a local step; after every *sync_every* of them, an outer one with all ranks.

        Raises as `bpsfast.push_pull` if an outer step is due; and `UnsupportedError` on this rank, if a parameter has a
        gradient that did not require one, or was not there, when this was made; or requires none any more.
        """
        parameters = self._outer.parameters
        frozen = [name for name, p in parameters.items() if not p.requires_grad]
        if frozen:
            raise UnsupportedError(f"{', '.join(frozen[:4])} required gradients when the optimizer was wrapped, and do "
                                   "not now, but the outer momentum would move them on: make the optimizer anew, and "
                                   "wrap that")
        result = local_step(self, closure, parameters.values())
        self._outer.after_step()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, and under "outer" weights, momentum, counts and this rank's parameters.

        All ranks call it together, after the same step. Between outer steps ranks differ, so each saves its own.
        """
        return {**self._base.state_dict(self), "outer": self._outer.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned on this rank, on all ranks together; the model's parameters too.

        Raises `MismatchError` if it has no outer state, or one of other parameters, and the inner optimizer's
        ValueError if its part of the state is of other groups; then nothing has changed.
        """
        if "outer" not in state_dict:
            raise MismatchError("the saved state has no outer weights: it is not an OuterOptimizer's")
        self._outer.check(state_dict["outer"])
        self._base.load_state_dict(self, {key: value for key, value in state_dict.items() if key != "outer"})
        self._outer.load(state_dict["outer"])


def OuterOptimizer(
    optimizer: torch.optim.Optimizer, parameters: torch.nn.Module | Iterable[Named], sync_every: int, *,
    outer_lr: float = 0.7, outer_momentum: float = 0.9, n_fragments: int = 1, overlap: int = 0, mix: float = 0.5,
    root_rank: int = 0,
) -> torch.optim.Optimizer:
    """Return *optimizer* as one that trains locally, and after every *sync_every* steps makes an outer one (DiLoCo).

    Blocks until all ranks have called it, and gives all of them rank *root_rank*'s parameters. The result is of a class
    derived from the optimizer's own; the original must not be used any more. Neither gradients nor buffers (as of
    BatchNorm) are exchanged.

    Parameters
    ----------
    parameters
        The model, or (name, parameter) of all parameters of the optimizer in forward order; only trained ones travel,
        halves as float32.
    outer_lr, outer_momentum
        Of the outer step, which is ``torch.optim.SGD(nesterov=True)``'s; its gradient is the mean over all ranks of
        how far parameters have moved. The owners keep the momentum.
    n_fragments
        Exchange the parameters in this many parts of about the same size, each at steps of its own, so that a link
        carries less at a time.
    overlap
        Take an answer over this many steps later, below *sync_every*; training goes on while it travels.
    mix
        With *overlap*: the share of the parameters at that time that is kept; the rest is the answer's.

    Raises
    ------
    ConfigError
        If an argument is not possible, or names are missing.
    StallError
        If a rank does not call it in time.
    """
    counts = {"sync_every": sync_every, "n_fragments": n_fragments, "overlap": overlap, "root_rank": root_rank}
    numbers = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "mix": mix}
    for what, value in {**counts, **numbers}.items():
        if not isinstance(value, int if what in counts else int | float):
            expected = "int" if what in counts else "a number"
            raise ConfigError(f"OuterOptimizer with {what}={value!r}: expected {expected}, got {type(value).__name__}")
    if sync_every < 1 or n_fragments < 1 or not 0 <= overlap < sync_every or not 0 <= mix < 1:
        raise ConfigError(f"OuterOptimizer with sync_every={sync_every}, n_fragments={n_fragments}, overlap={overlap}, "
                          f"mix={mix:g}: the first two are at least 1, 0 <= overlap < sync_every, 0 <= mix < 1")
    if n_fragments > sync_every:
        raise ConfigError(f"OuterOptimizer with n_fragments={n_fragments} and sync_every={sync_every}: each fragment "
                          "has a step of its own")
    spec = StoreSpec(rule="nesterov", learning_rate=outer_lr, momentum=outer_momentum)
    check(spec)
    given = parameters.named_parameters() if isinstance(parameters, torch.nn.Module) else parameters
    named = trained_parameters(optimizer, given)
    for name, p in named:
        if not p.is_floating_point():
            raise UnsupportedError(f"parameter {name!r} is {p.dtype}: outer steps are made of floats")
    wrapped = derive(optimizer, _OuterOptimizer)
    wrapped._outer = Outer(named, spec, sync_every, n_fragments, overlap, mix, root_rank)
    return wrapped  # type: ignore[no-any-return]


def _is_double(named: Named) -> bool:
    return named[1].dtype == torch.float64


def split_parameters(named: Sequence[Named], n_fragments: int) -> list[list[Named]]:
    """Return *named* parameters in up to *n_fragments* runs of about as many elements each, in their order."""
    total = sum(p.numel() for _, p in named)
    runs: list[list[Named]] = [[] for _ in range(n_fragments)]
    before = 0
    for name, p in named:
        middle = before + p.numel() / 2
        runs[min(int(middle * n_fragments / max(total, 1)), n_fragments - 1)].append((name, p))
        before += p.numel()
    return [run for run in runs if run]


class Fragment:
    """Exchanges the *named* parameters, which are all float64 or all travel as float32, and keeps their outer weights.

    One thread at a time; all ranks alike. *name* is the job's name of the tensor that the owners keep. It is sent in
    steps whose number modulo `sync_every` is *offset*.
    """

    def __init__(self, name: str, named: Sequence[Named], spec: StoreSpec, offset: int, priority: int) -> None:
        self.parameters = [p for _, p in named]
        self.offset = offset
        self.due = 0  # the step in which the answer is taken over; 0: none is expected
        self._has_arrived = False  # whether that answer is in `outer` already
        self._name, self._spec, self._priority = name, spec, priority
        self._dtype = torch.float64 if self.parameters[0].dtype == torch.float64 else torch.float32
        self.outer = torch.empty(sum(p.numel() for p in self.parameters), dtype=self._dtype)
        self._views = self._views_of(self.outer)
        self._stored = self._declare()

    def _declare(self) -> StoredTensor:
        return StoredTensor(self._name, tuple(self.outer.shape), wire_dtype_name(self._dtype), self._spec, average=True,
                            priority=self._priority)

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [p.numel() for p in self.parameters]
        return [piece.view(p.shape) for piece, p in zip(flat.split(sizes), self.parameters)]

    # -- initial values and saved states ---------------------------------------------------------------------------

    def start_seed(self, root_rank: int) -> None:
        """Begin to give all ranks the parameters of rank *root_rank*."""
        with torch.no_grad():
            for view, p in zip(self._views, self.parameters):
                view.copy_(p)
        self._stored.start_seed(self.outer.numpy(), root_rank)

    def seed(self, root_rank: int) -> None:
        """Take over the parameters of rank *root_rank*. Raises as `push_pull`."""
        self.outer.numpy()[:] = self._stored.seed(None, root_rank)
        self._write(0.0)

    def start_anew(self, state: dict[str, Any], root_rank: int) -> None:
        """Begin to set the owners' weights to the saved *state* of rank *root_rank*, which passes `check`."""
        self._stored.retire()
        self._stored = self._declare()
        self._stored.start_seed(state["outer"].numpy(), root_rank)

    def load(self, state: dict[str, Any], root_rank: int) -> None:
        """Complete what `start_anew` began, and set this rank's parameters."""
        self.outer.numpy()[:] = self._stored.seed(state["momentum"].numpy(), root_rank)
        self.due, self._has_arrived = state["due"], bool(state["due"])
        with torch.no_grad():
            for piece, p in zip(self._views_of(state["local"]), self.parameters):
                p.copy_(piece)

    def check(self, state: dict[str, Any]) -> None:
        """Raise `MismatchError` if a saved *state* is of other parameters."""
        if set(state) != {"outer", "momentum", "local", "due"}:
            raise MismatchError(f"{self._name!r} in the saved state has {sorted(state)}, not what OuterOptimizer saves")
        for what in ("outer", "momentum", "local"):
            found = state[what]
            if found.shape != self.outer.shape or found.dtype != self._dtype:
                raise MismatchError(f"{what} of {self._name!r} in the saved state are {tuple(found.shape)} of "
                                    f"{found.dtype}; this optimizer's parameters make {tuple(self.outer.shape)} of "
                                    f"{self._dtype}")

    def state(self) -> dict[str, Any]:
        """Return copies of weights, momentum and parameters; all ranks call it together. Waits for a pending answer."""
        if self._stored.in_flight:
            self._receive()
        local = torch.empty_like(self.outer)
        for view, p in zip(self._views_of(local), self.parameters):
            view.copy_(p.detach())
        return {"outer": self.outer.clone(), "momentum": torch.from_numpy(self._stored.momentum().copy()),
                "local": local, "due": self.due}

    # -- outer steps -----------------------------------------------------------------------------------------------

    def send(self, due: int) -> None:
        """Send how far the parameters have moved; the answer is to be taken over in step *due*."""
        with torch.no_grad():
            for target, view, p in zip(self._views_of(torch.from_numpy(self._stored.input)), self._views,
                                       self.parameters):
                torch.sub(view, p, out=target)
        self._stored.push_input()
        self.due = due

    def take_over(self, mix: float) -> None:
        """Wait for the answer; mix it with *mix* of the present parameters. Raises as `push_pull`."""
        if not self._has_arrived:
            self._receive()
        self.due, self._has_arrived = 0, False
        self._write(mix)

    def _receive(self) -> None:
        self.outer.numpy()[:] = self._stored.wait()
        self._has_arrived = True

    def _write(self, mix: float) -> None:
        with torch.no_grad():
            for view, p in zip(self._views, self.parameters):
                p.copy_(view if mix == 0 else mix * p.to(self._dtype) + (1 - mix) * view)
