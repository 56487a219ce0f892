"""The step API for trainers: all gradients of a model, in shared memory, summed as they become ready.

    g = bpsfast.Gradients({name: (shape, dtype), ...})      names in forward order (or `order`), on all ranks alike
    each step:  g[name][...] = gradient; g.ready(name)      from backward, in any order
                g.wait(name)                                the mean, read-only, when the layer needs it
                g.step()                                    the step is over

Names in forward order are priorities: what the next forward pass needs first is sent first. Small tensors are fused
into groups with one round each: a group goes out when its last member is ready.

Longer than other files: everything that a trainer calls is here, and what it stands on in files of its own: `edition`
(units, and where inputs lie), `progress` (of a step), `tuner`, `device.gathering` (units whose tensors are on a GPU).
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..base.dtypes import wire_name
from ..compression.choice import Choice, chosen_among
from ..gpu import arrays
from ..gpu.communicator import sums_in_island
from ..orchestration.codec import CodecSpec
from ..orchestration.errors import BusyError, MismatchError
from ..orchestration.messages import TensorSpec
from ..pyx.port import copy
from . import process
from .arguments import checked_learning_rate
from .gpu.device_path import DevicePath
from .gradient_layout import GradientLayout, LayoutSizes
from .input_memory import Region
from .tensor_input import TensorInput, tensor_input
from .tuner import Tuner
from .tuning_search import TuningPoint
from .unit import Unit


class Gradients:
    """Gradients of one model, one array each in this rank's shared memory.

    Returns at once; the first use of an array waits until all ranks have made theirs. Any thread; `ready` of
    different names may come from different threads.

    Parameters
    ----------
    tensors
        Name -> (shape, dtype), the same on all ranks and in the same order.
    order
        The names as the forward pass needs them, if that is another order; that of rank 0, and of the first `Gradients`
        with these names, counts.
    group_small
        Fuse tensors below the setting fusion_bytes.
    average
        Divide the sums by the number of ranks.
    prefix
        Put before each name on the wire, where names are the job's.
    compression
        How gradients travel between nodes, by their names: see `bpsfast.compression.choice`. What is compressed is
        fused with nothing, and has state: where anything is, nothing is tuned.
    tuned
        `tuned` of an earlier job: with the setting autotune that is used from the second step on, and nothing is tried.
        Rank 0's counts.
    device
        Where the arrays lie, if not in shared memory: "cuda", "cuda:1" (CuPy arrays), "host" (`bpsfast.gpu.host`).
        Then `ready` counts from the work on, that was enqueued on the owner's stream before it; the sum takes the
        gradient's place, and work that is enqueued after `wait` finds it. The stream is never waited for.
    afar
        The device from which all gradients will come, by `fill_from`.
    """

    def __init__(self, tensors: Mapping[str, tuple[tuple[int, ...], Any]], group_small: bool = True,
                 average: bool = True, prefix: str = "", order: Sequence[str] | None = None,
                 compression: Choice | None = None, tuned: TuningPoint | None = None, device: str | None = None,
                 afar: str | None = None) -> None:
        self._session = process.current()
        self._gathering = DevicePath(self._session)
        kinds = {name: (tuple(shape), wire_name(dtype)) for name, (shape, dtype) in tensors.items()}
        self.codecs = chosen_among(compression, kinds, self._session.settings.min_compress_bytes)
        self._device = device or afar
        self._far = {} if device is None else {name: arrays.zeros(*kind, device) for name, kind in kinds.items()}
        self._names = {name: prefix + name for name in tensors}
        # Groups of one job have different names: two models may be trained beside each other.
        names = list(self._names.values())
        group = f"{names[0]} to {names[-1]}, {len(names)} tensors" if group_small and names else None
        if order is not None and (len(order) != len(tensors) or set(order) != set(tensors)):
            raise MismatchError(f"order must be the names of all {len(tensors)} gradients, got {list(order)}")
        self._by_urgency = list(tensors if order is None else order)
        urgency = {name: -place for place, name in enumerate(self._by_urgency)}
        tunes = self._session.settings.autotune and self._session.size > 1 and bool(names) and not self.codecs
        family = f"{names[0]} to {names[-1]}, {len(names)} tensors" if tunes else ""
        specs = {
            name: TensorSpec(name=self._names[name], shape=shape, dtype=dtype, average=average,
                             group=None if name in self.codecs else group, priority=urgency[name], edition_of=family,
                             codec=self.codecs.get(name), islands=self._device is not None
                             and sums_in_island(self._session.settings, dtype, self.codecs.get(name)))
            for name, (shape, dtype) in kinds.items()
        }
        self._session.n_users.update(self._names.values())
        self._edition = GradientLayout(self._session, specs, 0, LayoutSizes(), self._device)
        self._first = self._last = self._edition  # that of the last step
        self._tuner: Tuner | None = None
        self._tuned = tuned  # of an earlier job, and once the tuner is gone
        if tunes and not self._session.tunes:  # of several models the first: tuners would measure each other
            self._session.tunes = True
            self._tuner = Tuner(self._session, family, specs, self._edition, self._by_urgency, tuned)
        self._lock = threading.Lock()
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._homes: dict[str, Region] = {}
        self._progress = StepProgress(tensors)
        self._rates: dict[str, float] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Any:
        """Return the array of *name*, NumPy's or the device's: write the gradient here, between the step's end and
        `ready`.
        """
        self._prepare(name)
        if self._far:
            return self._far[name]
        return self._arrays[name]

    def region(self, name: str) -> Region:
        """Return where the bytes of *name* lie."""
        self._prepare(name)
        return self._homes[name]

    def codec(self, name: str) -> CodecSpec | None:
        """Return how *name* is compressed between the nodes of this job; None: it is summed exactly."""
        self._prepare(name)
        return self._edition.units[name].codec if self._session.n_nodes > 1 else None

    def ready(self, name: str) -> None:
        """Announce that the gradient of *name* is complete for this step; it must not be written until the step ends.

        Raises
        ------
        BusyError
            If *name* was ready in this step already, or the last step was not ended.
        MismatchError
            If there is no such name.
        """
        self._prepare(name)
        if self._far:
            memory = tensor_input(self._far[name])
            self.fill_from(name, memory, memory)
        else:
            self._put(name, self._homes[name].address)

    def fill_from(self, name: str, source: TensorInput, target: TensorInput | None = None) -> None:
        """As `fill`, of memory on a device: nothing is waited for. *source* stays as it is until `wait` or `deliver`
        has returned for *name*; the sum goes to *target*, if one is given, as soon as it is there.

        Raises
        ------
        DeviceError
            If the device cannot be used; failures of work that is enqueued come to those who wait for the sum.
        """
        self._prepare(name)
        unit, member = self._edition.units[name], self._edition.members[name]
        for memory in (source, target):
            if memory is not None and memory.nbytes != member.nbytes:
                raise MismatchError(f"gradient {name!r} has {member.nbytes} bytes, {memory.nbytes} came")
        self._tell_rate(name, unit)
        if self._enter(name, lambda: self._gathering.add(unit, member.offset, source, target)):
            self._push(unit)

    def fill(self, name: str, address: int, nbytes: int) -> None:
        """Copy the gradient of *name* from *address* (natively; nothing if it lies in its place), then as `ready`."""
        self._prepare(name)
        if nbytes != self._edition.members[name].nbytes:
            raise MismatchError(f"gradient {name!r} has {self._edition.members[name].nbytes} bytes, {nbytes} came")
        self._put(name, address)

    @property
    def learning_rate(self) -> float | Mapping[str, float]:
        """With which learning rates sums will be used, as far as it was said, for error feedback. Set a number, or some
        by their names: they count from the next gradient of that name on; 0: as before.

        Raises
        ------
        ConfigError
            If a rate is not possible.
        MismatchError
            If there is no such name.
        """
        return dict(self._rates)

    @learning_rate.setter
    def learning_rate(self, rate: float | Mapping[str, float]) -> None:
        rate_of = rate if isinstance(rate, Mapping) else dict.fromkeys(self._names, rate)
        found = {name: checked_learning_rate(value) for name, value in rate_of.items()}
        for name in found:
            self._require(name)
        self._rates.update({name: value for name, value in found.items() if value is not None and name in self.codecs})

    def _put(self, name: str, address: int) -> None:
        """Take the gradient at *address*, which is the place where its unit wants it, or copied there."""
        unit, place = self._edition.units[name], self._edition.places[name]
        self._tell_rate(name, unit)
        if address == place.address:
            if self._enter(name):
                self._push(unit)
        elif len(unit.members) == 1:
            if self._enter(name):
                unit.push(address, unit.nbytes)  # each partition is announced as soon as it is copied
        else:
            self._progress.refuse_twice(name)
            copy(place.address, address, place.array.nbytes)
            if self._enter(name):
                self._push(unit)

    def _push(self, unit: Unit) -> None:
        """Push *unit*, whose members are all ready."""
        if not self._gathering.send(unit):
            unit.push_staging()

    def _tell_rate(self, name: str, unit: Unit) -> None:
        if name in self._rates:
            unit.learning_rate = self._rates[name]

    def zero_missing(self) -> list[str]:
        """Let every gradient that is not ready contribute zeros; return their names."""
        missing = self.missing()
        for name in missing:
            self._prepare(name)
            unit = self._edition.units[name]
            if unit.islands or unit.on_device:  # devices hand the sum on, or a card takes it from there
                assert self._device is not None, "only devices are in islands"
                shape, dtype = self._edition.members[name].shape, self._edition.units[name].dtype_name
                zeros = tensor_input(arrays.zeros(shape, dtype, self._device))
                self.fill_from(name, zeros, tensor_input(self._far[name]) if self._far else zeros)
            else:
                home = self._homes[name]
                home.array.fill(0)
                self._put(name, home.address)
        return missing

    def missing(self) -> list[str]:
        """Return the names that are not ready in this step."""
        return self._progress.missing()

    @property
    def busy(self) -> bool:
        """Whether a gradient of this step is ready: the step has begun and not ended."""
        return self._progress.has_begun

    def wait(self, name: str, timeout_s: float | None = None) -> Any:
        """Return the sum (mean) of *name* as a read-only array, waiting for it; on a device as `Gradients` says.

        It is that of this step, if the gradient is ready in this step, else that of the last step. The array is valid
        until the second next step's gradient of that name is ready.

        Raises
        ------
        MismatchError
            If there is none: nothing was ready yet, or fused neighbours are not.
        StallError, PeerLostError
            As `push_pull`.
        """
        edition, unit, round = self._awaited(name)
        if self._far:
            self.deliver_to(name, tensor_input(self._far[name]), timeout_s)
            return self._far[name]
        self._gathering.wait(unit, round, self._deadline(timeout_s))
        views = edition.views[round & 1]
        if name not in views:  # the same memory every other round
            views[name] = unit.member_view(edition.members[name], round)
        return views[name]

    def deliver(self, name: str, address: int, nbytes: int, timeout_s: float | None = None) -> None:
        """Wait for the sum (mean) of *name* and copy it natively to *address*; raises as `wait`."""
        edition, unit, round = self._awaited(name)
        member = edition.members[name]
        if nbytes != member.nbytes:
            raise MismatchError(f"gradient {name!r} has {member.nbytes} bytes, {nbytes} are wanted")
        deadline = self._deadline(timeout_s)
        self._gathering.wait_departed(unit, round, deadline)
        unit.deliver(round, address, member.offset, nbytes, max(0.0, deadline - time.monotonic()))

    def deliver_to(self, name: str, target: TensorInput, timeout_s: float | None = None) -> None:
        """Wait for the sum (mean) of *name*, and let work on *target*'s device that its owner enqueues from now on find
        it in *target*; raises as `wait`, and `DeviceError`.
        """
        edition, unit, round = self._awaited(name)
        member = edition.members[name]
        if target.nbytes != member.nbytes:
            raise MismatchError(f"gradient {name!r} has {member.nbytes} bytes, {target.nbytes} are wanted")
        self._gathering.deliver(unit, round, member.offset, target, self._deadline(timeout_s))

    @property
    def tuned(self) -> TuningPoint | None:
        """What the setting autotune has found best so far, as far as this rank knows: to be saved with the model."""
        return self._tuner.best if self._tuner is not None else self._tuned

    def states(self) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
        """Return what this rank's node keeps of compressed gradients, by name, to be saved with the model.

        Between steps. Every node has its own (`trainer.states`). Nothing is kept of what is not compressed.
        """
        return {name: self._session.states.save(unit) for name, unit in self._coded_units().items()}

    def load_states(self, states: Mapping[str, np.ndarray[Any, np.dtype[np.uint8]]]) -> None:
        """Go on from what `states` returned on this node, on all its ranks, before any of them pushes again.

        Raises
        ------
        MismatchError
            If *states* are of other gradients, of another node or of another compression.
        """
        units = self._coded_units()
        for name in states:
            if name not in units:
                raise MismatchError(f"there is a state of gradient {name!r}, which is not compressed here: "
                                    f"{', '.join(units) or 'none'} is")
        for name, state in states.items():
            self._session.states.load(units[name], state)

    def _coded_units(self) -> dict[str, Unit]:
        for name in self.codecs:
            self._prepare(name)
        return {name: self._edition.units[name] for name in self.codecs
                if self._edition.units[name].codec is not None}

    def retire(self) -> bool:
        """Give up names and memory for good, which are others' as soon as all ranks have done so. Waits for no rank.

        Returns False, and gives up nothing, while that is not possible: ranks have not all declared these gradients, a
        sum is under way, or they are being tuned. Arrays that were handed out must not be used any more.
        """
        if self._session.closed:
            return True
        edition = self._edition
        if self._tuner is not None or not edition.is_committed:
            return False
        units = edition.distinct or [self._session.tensors.unit(wire) for wire in edition.wires.values()]
        if any(unit.in_flight and not unit.done(unit.round) for unit in units):
            return False
        if self._homes:
            for unit in units:
                if unit.in_flight:
                    self._gathering.finish(unit, unit.round, self._deadline(None))
        edition.retire(self._session.settings.timeout_s, keeps_input=False)
        if self._first is not edition:
            self._first.release_input()
        return True

    def finish(self, name: str, timeout_s: float | None = None) -> None:
        """Wait for the sum of *name*, and of those fused with it, without looking at it; raises as `wait`."""
        _, unit, round = self._awaited(name)
        self._gathering.finish(unit, round, self._deadline(timeout_s))

    def step(self, timeout_s: float | None = None, wait: bool = True) -> None:
        """End the step: wait until all sums are there. `wait` goes on to return them; the arrays may be written again.

        With the setting autotune partitions, fusion, credit and streams may be others from here on; arrays stay.

        With *wait* False nothing is waited for: an array may be written, and be ready, again once `wait` or `finish`
        has returned for its name and those fused with it. So the next forward pass overlaps the end of this step.

        Raises
        ------
        MismatchError
            If gradients are not ready, naming them; the step goes on.
        StallError, PeerLostError
            As `push_pull`.
        """
        missing = self.missing()
        if missing:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise MismatchError(
                f"the step ends, but {len(missing)} of {len(self._names)} gradients are not ready: {shown}"
            )
        deadline = self._deadline(timeout_s)
        if self._tuner is not None:
            self._tuner.announce()
        if wait:
            # The least urgent first: it mostly completes last, and then one sleep was enough.
            for unit in reversed(self._edition.distinct):
                self._gathering.finish(unit, unit.round, deadline)
        chosen = self._edition
        if self._tuner is not None:
            chosen = self._tuner.conclude(max(0.0, deadline - time.monotonic()))
            if self._tuner.is_over:
                self._tuned, self._tuner = self._tuner.best, None
        with self._lock:
            if chosen is not self._edition:
                for unit in chosen.distinct:
                    unit.follow(self._edition.distinct[0])
            self._last, self._edition = self._edition, chosen
            self._progress.end()

    # -- innards ---------------------------------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._session.settings.timeout_s if timeout_s is None else timeout_s)

    def _prepare(self, name: str) -> None:
        """Check the name; at the first call wait for the units and lay the arrays out in their memory."""
        self._require(name)
        if self._arrays:
            return
        with self._lock:
            if not self._arrays:
                self._lay_out()

    def _require(self, name: str) -> None:
        if name not in self._names:
            raise MismatchError(f"there is no gradient {name!r}; the names are {', '.join(list(self._names)[:8])}, ...")

    def _lay_out(self) -> None:
        edition = self._edition
        edition.lay_out(self._by_urgency, {})
        self._homes = dict(edition.places)
        self._arrays = {
            name: home.array.view(edition.units[name].dtype).reshape(edition.members[name].shape)
            for name, home in self._homes.items()}

    def _enter(self, name: str, gather: Callable[[], None] = lambda: None) -> bool:
        """Note that *name* is ready, and *gather* it; return whether its unit is whole now."""
        self._prepare(name)
        with self._lock:
            return self._progress.enter(name, self._edition.units[name], gather)

    def _awaited(self, name: str) -> tuple[GradientLayout, Unit, int]:
        """Return the edition and the unit of *name*, and the round whose result is meant."""
        self._prepare(name)
        with self._lock:  # `step` of another thread changes all of it
            is_ready = self._progress.is_ready(name)
            edition = self._edition if is_ready else self._last
            unit = edition.units[name]
            wires = {wire: own for own, wire in edition.wires.items()}
            absent = [wires[wire] for wire in unit.members if not self._progress.is_ready(wires[wire])]
            if not is_ready or self._progress.is_whole(unit):
                absent = []
        if absent:
            raise MismatchError(f"gradient {name!r} travels together with {', '.join(absent)}, which are not ready yet")
        if not unit.has_begun:
            raise MismatchError(f"gradient {name!r} is waited for, but it was never ready")
        return edition, unit, unit.round


class StepProgress:
    """The step that goes on, of gradients *names*. Any thread asks; `enter` and `end` under its owner's lock."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._ready: set[str] = set()
        self._left: dict[str, int] = {}  # by unit that some are ready of: how many are not

    @property
    def has_begun(self) -> bool:
        """Whether some are ready."""
        return bool(self._ready)

    def is_ready(self, name: str) -> bool:
        """Whether *name* is."""
        return name in self._ready

    def missing(self) -> list[str]:
        """Return the names that are not ready."""
        return [name for name in self._names if name not in self._ready]

    def is_whole(self, unit: Unit) -> bool:
        """Whether all of *unit* are ready."""
        return self._left.get(unit.name) == 0

    def refuse_twice(self, name: str) -> None:
        """Raise `BusyError` if *name* is ready."""
        if name in self._ready:
            raise BusyError(f"gradient {name!r} is ready for the second time in one step: end the step by step() first")

    def enter(self, name: str, unit: Unit, gather: Callable[[], None] = lambda: None) -> bool:
        """Note that *name*, of *unit*, is ready, after *gather*; return whether *unit* is whole now.

        Raises as `refuse_twice`, and as *gather*; then nothing was noted.
        """
        self.refuse_twice(name)
        gather()
        self._ready.add(name)
        self._left[unit.name] = left = self._left.get(unit.name, len(unit.members)) - 1
        return left == 0

    def end(self) -> None:
        """Begin the next step."""
        self._ready.clear()
        self._left.clear()
