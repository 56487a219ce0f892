"""The step API for trainers: all gradients of a model, in shared memory, summed as they become ready.

    g = bpsfast.Gradients({name: (shape, dtype), ...})      names in forward order (or `order`), on all ranks alike
    each step:  g[name][...] = gradient; g.ready(name)      from backward, in any order
                g.wait(name)                                the mean, read-only, when the layer needs it
                g.step()                                    the step is over

Names in forward order are priorities: what the next forward pass needs first is sent first. Small tensors are fused
into units with one round each: a unit is pushed when its last member is ready.
"""
from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
from .gradient_layout import Gradient, GradientLayout, LayoutSizes, users_of_names
from .input_memory import Region
from .session import Session
from .tensor_input import TensorInput, tensor_input
from .tuner import Tuner
from .tuning_search import TuningPoint
from .unit import Unit


class HostPath:
    """How units are pushed and waited for whose tensors lie in host memory. `DevicePath` does the same for devices."""

    def push(self, unit: Unit) -> None:
        """Push *unit*, whose members all lie in its staging memory."""
        unit.push()

    def wait(self, unit: Unit, round: int, deadline: float) -> None:
        """Wait for *round* of *unit*. Raises as `Unit.wait`."""
        unit.wait(round, max(0.0, deadline - time.monotonic()))

    finish = wait

    def wait_departed(self, unit: Unit, round: int, deadline: float) -> None:
        """Return at once: the input lies in host memory."""


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
        Prefix of each name in the job.
    compression
        How gradients are compressed between nodes, by name: see `bpsfast.compression.choice`. Compressed gradients are
        not fused and have state: if there are any, nothing is tuned.
    tuned
        `tuned` of an earlier job: with the setting autotune it is used from the second step on, without a search. Rank
        0's counts.
    device
        Where the arrays lie, if not in shared memory: "cuda", "cuda:1" (CuPy arrays), "host" (`bpsfast.gpu.host`).
        Then `ready` reads a gradient after the work that its owner's stream has by then. The sum replaces the gradient,
        and work that is enqueued after `wait` sees it. The host never waits for the stream.
    on_device
        The device on which all gradients lie that `fill_from` will get. Its earlier name *afar* is deprecated.
    """

    def __init__(self, tensors: Mapping[str, tuple[tuple[int, ...], Any]], group_small: bool = True,
                 average: bool = True, prefix: str = "", order: Sequence[str] | None = None,
                 compression: Choice | None = None, tuned: TuningPoint | None = None, device: str | None = None,
                 on_device: str | None = None, afar: str | None = None) -> None:
        if afar is not None:
            warnings.warn("Gradients(afar=...) is called on_device now", DeprecationWarning, stacklevel=2)
            on_device = afar
        self._session = session = process.current()
        kinds = {name: (tuple(shape), wire_name(dtype)) for name, (shape, dtype) in tensors.items()}
        self.codecs = chosen_among(compression, kinds, session.settings.min_compress_bytes)
        self._device = device or on_device
        self._path: HostPath | DevicePath = HostPath() if self._device is None else DevicePath(session)
        self._on_device = {} if device is None else {name: arrays.zeros(*kind, device) for name, kind in kinds.items()}
        self._names = {name: prefix + name for name in tensors}
        # Groups of one job have different names: two models may be trained beside each other.
        names = list(self._names.values())
        title = f"{names[0]} to {names[-1]}, {len(names)} tensors" if names else ""
        if order is not None and (len(order) != len(tensors) or set(order) != set(tensors)):
            raise MismatchError(f"order must be the names of all {len(tensors)} gradients, got {list(order)}")
        self._by_priority = list(tensors if order is None else order)
        priority = {name: -position for position, name in enumerate(self._by_priority)}
        tunes = session.settings.autotune and session.size > 1 and bool(names) and not self.codecs
        group = title if group_small and names else None
        specs = {
            name: TensorSpec(name=self._names[name], shape=shape, dtype=dtype, average=average,
                             group=None if name in self.codecs else group, priority=priority[name],
                             edition_of=title if tunes else "", codec=self.codecs.get(name),
                             islands=self._device is not None
                             and sums_in_island(session.settings, dtype, self.codecs.get(name)))
            for name, (shape, dtype) in kinds.items()
        }
        session.extension(users_of_names).update(names)
        self._layout = GradientLayout(session, specs, 0, LayoutSizes(), self._device)
        self._first = self._last = self._layout  # the last step's
        self._tuner: Tuner | None = None
        self._tuned = tuned  # by an earlier job, or by a tuner that is done
        tuned_models = session.extension(_tuned_models)
        if tunes and not tuned_models:  # only the first model: tuners would measure each other
            tuned_models.append(title)
            self._tuner = Tuner(session, title, specs, self._layout, self._by_priority, tuned)
        self._lock = threading.Lock()
        self._gradients: dict[str, Gradient] = {}  # of the layout in use, once it is laid out
        self._n_ready = 0
        self._rates: dict[str, float] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Any:
        """Return the array of *name*, a NumPy or a device array: write the gradient here, between the end of a step and
        `ready`.
        """
        gradient = self._gradients.get(name) or self._lay_out(name)
        return self._on_device[name] if self._on_device else gradient.array

    def region(self, name: str) -> Region:
        """Return the memory of *name*."""
        return (self._gradients.get(name) or self._lay_out(name)).region

    def codec(self, name: str) -> CodecSpec | None:
        """Return how *name* is compressed between the nodes of this job; None: it is summed exactly."""
        gradient = self._gradients.get(name) or self._lay_out(name)
        return gradient.unit.codec if self._session.n_nodes > 1 else None

    # -- pushing ---------------------------------------------------------------------------------------------------

    def ready(self, name: str) -> None:
        """Announce that the gradient of *name* is complete for this step; do not write it until the step ends.

        Raises
        ------
        BusyError
            If *name* was ready in this step already, or the last step was not ended.
        MismatchError
            If there is no such name.
        """
        gradient = self._gradients.get(name) or self._lay_out(name)
        if self._on_device:
            memory = tensor_input(self._on_device[name])
            self.fill_from(name, memory, memory)
        else:
            self._push(gradient, gradient.region.address)

    def fill(self, name: str, address: int, nbytes: int) -> None:
        """Copy the gradient of *name* from *address*, unless it lies in its place, then as `ready`."""
        gradient = self._gradients.get(name) or self._lay_out(name)
        if nbytes != gradient.nbytes:
            raise MismatchError(f"gradient {name!r} has {gradient.nbytes} bytes, {nbytes} came")
        self._push(gradient, address)

    def _push(self, gradient: Gradient, address: int) -> None:
        """Take the gradient at *address*, and push its unit if that is whole now."""
        unit = gradient.unit
        if self._rates and gradient.name in self._rates:
            unit.learning_rate = self._rates[gradient.name]
        if address != gradient.address and not gradient.is_alone:
            if gradient.is_ready:
                raise _twice(gradient)
            copy(gradient.address, address, gradient.nbytes)
        with self._lock:
            if gradient.is_ready:
                raise _twice(gradient)
            gradient.is_ready = True
            self._n_ready += 1
            gradient.group.n_left -= 1
            is_whole = gradient.group.n_left == 0
        if gradient.is_alone:
            unit.push(address)  # each partition is announced as soon as it is copied
        elif is_whole:
            self._path.push(unit)

    def fill_from(self, name: str, source: TensorInput, target: TensorInput | None = None) -> None:
        """As `fill`, of memory on a device; does not block.

        Do not write *source* until `wait` or `deliver` has returned for *name*. The sum is copied to *target*, if one
        is given, as soon as it is complete.

        Raises
        ------
        DeviceError
            If the device cannot be used; errors of enqueued work are raised by calls that wait for the sum.
        """
        gradient = self._gradients.get(name) or self._lay_out(name)
        unit = gradient.unit
        for memory in (source, target):
            if memory is not None and memory.nbytes != gradient.nbytes:
                raise MismatchError(f"gradient {name!r} has {gradient.nbytes} bytes, {memory.nbytes} came")
        if name in self._rates:
            unit.learning_rate = self._rates[name]
        with self._lock:
            if not isinstance(self._path, DevicePath):  # of a model whose other tensors lie in host memory
                self._path = DevicePath(self._session)
            path = self._path
            if gradient.is_ready:
                raise _twice(gradient)
            path.add(unit, gradient.offset, source, target)
            gradient.is_ready = True
            self._n_ready += 1
            gradient.group.n_left -= 1
            is_whole = gradient.group.n_left == 0
        if is_whole:
            path.push(unit)

    @property
    def learning_rate(self) -> float | Mapping[str, float]:
        """The learning rates of steps that use the sums, for error feedback, as far as they were set.

        Set a number, or numbers by name, for the next gradients of these names; 0: as before.

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

    def zero_missing(self) -> list[str]:
        """Let every gradient that is not ready contribute zeros; return their names."""
        missing = self.missing()
        for name in missing:
            gradient = self._gradients.get(name) or self._lay_out(name)
            unit = gradient.unit
            if unit.islands or unit.on_device:  # devices hand the sum on, or a card takes it from there
                assert self._device is not None, "only devices are in islands"
                zeros = tensor_input(arrays.zeros(gradient.shape, unit.dtype_name, self._device))
                self.fill_from(name, zeros, tensor_input(self._on_device[name]) if self._on_device else zeros)
            else:
                gradient.region.array.fill(0)
                self._push(gradient, gradient.region.address)
        return missing

    def missing(self) -> list[str]:
        """Return the names that are not ready in this step."""
        if self._n_ready == len(self._names):
            return []
        gradients = self._gradients
        return [name for name in self._names if not gradients or not gradients[name].is_ready]

    @property
    def busy(self) -> bool:
        """Whether a gradient of this step is ready: the step has begun and not ended."""
        return self._n_ready > 0

    # -- results ---------------------------------------------------------------------------------------------------

    def wait(self, name: str, timeout_s: float | None = None) -> Any:
        """Wait for the sum (mean) of *name* and return it as a read-only array; for a device see `Gradients`.

        It is this step's sum if the gradient is ready in this step, else the last step's. The array is valid until the
        second next step's gradient of that name is ready.

        Raises
        ------
        MismatchError
            If there is none: it was never ready, or tensors that are fused with it are not.
        StallError, PeerLostError
            As `push_pull`.
        """
        if self._on_device:
            self.deliver_to(name, tensor_input(self._on_device[name]), timeout_s)
            return self._on_device[name]
        gradient, round = self._awaited(name)
        self._path.wait(gradient.unit, round, self._deadline(timeout_s))
        return gradient.view(round)

    def deliver(self, name: str, address: int, nbytes: int, timeout_s: float | None = None) -> None:
        """Wait for the sum (mean) of *name* and copy it to *address*; raises as `wait`."""
        gradient, round = self._awaited(name, nbytes)
        deadline = self._deadline(timeout_s)
        self._path.wait_departed(gradient.unit, round, deadline)
        gradient.unit.deliver(round, address, gradient.offset, nbytes, max(0.0, deadline - time.monotonic()))

    def deliver_to(self, name: str, target: TensorInput, timeout_s: float | None = None) -> None:
        """Wait for the sum (mean) of *name*; work that the owner of *target* enqueues from now on finds it in *target*.

        Raises as `wait`, and `DeviceError`.
        """
        gradient, round = self._awaited(name, target.nbytes)
        path = self._path if isinstance(self._path, DevicePath) else DevicePath(self._session)
        path.deliver(gradient.unit, round, gradient.offset, target, self._deadline(timeout_s))

    def finish(self, name: str, timeout_s: float | None = None) -> None:
        """Wait for the sum of *name* and of those fused with it, without reading it; raises as `wait`."""
        gradient, round = self._awaited(name)
        self._path.finish(gradient.unit, round, self._deadline(timeout_s))

    def step(self, timeout_s: float | None = None, wait: bool = True) -> None:
        """End the step: wait until all sums are there. `wait` goes on to return them; the arrays may be written again.

        With the setting autotune, partitions, fusion, credit and streams may change here; arrays stay.

        With *wait* False this does not block: an array may be written and be ready again once `wait` or `finish` has
        returned for its name and those fused with it. So the next forward pass overlaps the end of this step.

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
            for group in reversed(self._layout.groups):
                self._path.finish(group.unit, group.unit.round, deadline)
        chosen = self._layout
        if self._tuner is not None:
            chosen = self._tuner.conclude(max(0.0, deadline - time.monotonic()))
            if self._tuner.is_over:
                self._tuned, self._tuner = self._tuner.best, None
        with self._lock:
            if chosen is not self._layout:
                for group in chosen.groups:
                    group.unit.follow(self._layout.groups[0].unit)
            self._last, self._layout = self._layout, chosen
            for layout in {self._last, chosen}:
                layout.begin_step()
            self._gradients, self._n_ready = chosen.gradients, 0

    def _awaited(self, name: str, nbytes: int | None = None) -> tuple[Gradient, int]:
        """Return the gradient of *name*, and the round whose result is meant; *nbytes*: how many bytes are wanted."""
        gradient = self._gradients.get(name) or self._lay_out(name)
        with self._lock:  # another thread may call `step`
            if not gradient.is_ready:
                gradient = self._last.gradients[name]
            elif gradient.group.n_left:
                absent = ", ".join(each.name for each in gradient.group.gradients if not each.is_ready)
                raise MismatchError(f"gradient {name!r} travels together with {absent}, which are not ready yet")
            unit = gradient.unit
            round = unit.round
        if not unit.has_begun:
            raise MismatchError(f"gradient {name!r} is waited for, but it was never ready")
        if nbytes is not None and nbytes != gradient.nbytes:
            raise MismatchError(f"gradient {name!r} has {gradient.nbytes} bytes, {nbytes} are wanted")
        return gradient, round

    # -- state, and retiring ---------------------------------------------------------------------------------------

    @property
    def tuned(self) -> TuningPoint | None:
        """The best point that autotune has found, as far as this rank knows: to be saved with the model."""
        return self._tuner.best if self._tuner is not None else self._tuned

    def states(self) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
        """Return what this rank's node keeps of compressed gradients, by name, to be saved with the model.

        Between steps. Every node has its own (`trainer.codec_state`). Uncompressed gradients have no state.
        """
        return {name: self._session.states.save(unit) for name, unit in self._coded_units().items()}

    def load_states(self, states: Mapping[str, np.ndarray[Any, np.dtype[np.uint8]]]) -> None:
        """Continue from what `states` returned on this node; call it on all its ranks before any of them pushes again.

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
        units = {name: (self._gradients.get(name) or self._lay_out(name)).unit for name in self.codecs}
        return {name: unit for name, unit in units.items() if unit.codec is not None}

    def retire(self) -> bool:
        """Release names and memory, which are free as soon as all ranks have done so. Does not wait.

        Returns False, and does nothing, while not all ranks have declared these gradients, a sum is under way, or they
        are being tuned. Arrays that were handed out must not be used any more.
        """
        if self._session.closed:
            return True
        layout = self._layout
        if self._tuner is not None or not layout.is_committed:
            return False
        units = layout.units
        if any(unit.in_flight and not unit.done(unit.round) for unit in units):
            return False
        if self._gradients:
            for unit in units:
                if unit.in_flight:
                    self._path.finish(unit, unit.round, self._deadline(None))
        layout.retire(self._session.settings.timeout_s, keeps_input=False)
        if self._first is not layout:
            self._first.release_input()
        return True

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._session.settings.timeout_s if timeout_s is None else timeout_s)

    def _require(self, name: str) -> None:
        if name not in self._names:
            raise MismatchError(f"there is no gradient {name!r}; the names are {', '.join(list(self._names)[:8])}, ...")

    def _lay_out(self, name: str) -> Gradient:
        """Return the gradient of *name*, checked; wait for the units and lay the arrays out in their memory, once."""
        self._require(name)
        with self._lock:
            if not self._gradients:
                self._layout.lay_out(self._by_priority)
                self._gradients = self._layout.gradients
            return self._gradients[name]


def _tuned_models(session: Session) -> list[str]:
    """Return the models of *session* that are tuned, by title (`Session.extension`)."""
    return []


def _twice(gradient: Gradient) -> BusyError:
    return BusyError(f"gradient {gradient.name!r} is ready for the second time in one step: end the step by step() "
                     "first")
