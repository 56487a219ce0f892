"""CrossBarrier: starts the next step before all gradients are summed, and waits for each where its variable is read."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from ..orchestration.errors import BusyError, ConfigError, UnsupportedError
from ..trainer import process
from ..trainer.arguments import Average, averages
from ..trainer.gradients import Gradients
from .memory import Array, address_of, array_of, empty, tensor_of, traced, wire_dtype
from .optimizer import names_of

Update = Callable[[Any, Any], Any]


class CrossBarrier:
    """Averages gradients over all ranks, and applies each when its variable is read in the next step.

        crossing = bps.CrossBarrier(variables, lambda variable, gradient: variable.assign_sub(0.1 * gradient))

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                hidden = tf.tanh(x @ crossing.read(first))
                loss = tf.reduce_mean((hidden @ crossing.read(second)) ** 2)
            tape.gradient(loss, crossing.variables)           # sends each gradient when it has been computed
        ...
        crossing.settle()                                     # before variables are saved, evaluated or compared

    The weights are bit for bit those of `DistributedGradientTape` with the same *update*. Eagerly and inside
    `tf.function`; one thread, and one step at a time.

    Parameters
    ----------
    variables
        Of known shapes, in the order of their first use in a step, the same on all ranks. Each must be read once in
        every step that computes gradients. A variable on which the loss does not depend has a gradient of zeros.
    update
        Called with a variable and its averaged gradient; while tracing, once for each variable. It may change only that
        variable and its state, such as its momentum. Variables that it uses must exist before.
    op
        Average or Sum.

    Raises
    ------
    ConfigError
        If there are no variables, or *op* is neither.
    UnsupportedError
        If one is not a `tf.Variable` of known shape and of a supported dtype.
    """

    def __init__(self, variables: Sequence[Any], update: Update, *, op: int = Average) -> None:
        session = process.current()
        mean = averages(True, op)
        self.variables = list(variables)
        if not self.variables:
            raise ConfigError("CrossBarrier of no variables")
        for place, variable in enumerate(self.variables):
            if not isinstance(variable, tf.Variable) or not variable.shape.is_fully_defined():
                raise UnsupportedError(f"variable {place} is a {type(variable).__name__}: CrossBarrier needs "
                                       "tf.Variables of known shapes")
            wire_dtype(variable.dtype, f"variable {place}")
        titles = names_of(self.variables, self.variables)
        self._kinds = {title: (tuple(variable.shape), variable.dtype.name)
                       for title, variable in zip(titles, self.variables)}
        self._names = {id(variable): title for title, variable in zip(titles, self.variables)}
        if len(self._names) < len(titles):
            raise ConfigError("a variable is named twice: each is read once in every step")
        self._update = update
        edition = session.tensors.model_number(f"CrossBarrier.{title}" for title in titles)
        self._gradients = Gradients(self._kinds, average=mean, prefix=f"CrossBarrier{edition or ''}.")
        self._sent: set[str] = set()  # in this step; kept until the next step's first gradient
        self._read: set[str] = set()  # since the last gradient

    def read(self, variable: Any) -> Any:
        """Wait for the sum of *variable*'s last gradient, apply it, and return the value for this step.

        The tape sends its gradient as soon as it is computed. Inside `tf.function` errors other than ConfigError are
        `tf.errors` with the class and text of bpsfast's error.

        Raises
        ------
        ConfigError
            For a variable that is not one of `variables`.
        BusyError
            If it has been read in this step: use the tensor that was returned.
        StallError, PeerLostError, ClosedError
            As `bpsfast.push_pull`.
        """
        title = self._names.get(id(variable))
        if title is None:
            raise ConfigError(f"{getattr(variable, 'name', variable)!r} is not one of the {len(self._names)} variables "
                              "of this CrossBarrier")
        self._settle(variable, title)

        @tf.custom_gradient
        def used(value: Any) -> Any:
            return tf.identity(value), lambda gradient: self._begun(title, gradient)

        return used(variable.value())

    def settle(self) -> None:
        """Wait for all sums under way, and apply them. Not inside `tf.function`.

        Call it after the last step, and after a forward pass without gradients, such as an evaluation by `read`.
        """
        if tf.inside_function():
            raise UnsupportedError("CrossBarrier.settle() inside tf.function: call it outside, after the last step")
        for variable, title in zip(self.variables, self._kinds):
            if self._sent and title not in self._read:
                self._settle(variable, title)
        if self._sent:
            self._close()
        self._read.clear()

    def _settle(self, variable: Any, title: str) -> None:
        kind = self._kinds[title]
        if tf.inside_function():
            has, gradient = traced(partial(self._waited, title), [], [(tf.bool, []), (variable.dtype, kind[0])])
            tf.cond(has, lambda: _done(self._update(variable, gradient)), lambda: tf.constant(False))
            return
        awaited, array = self._waited(title)
        if awaited:
            self._update(variable, tensor_of(array))

    def _begun(self, title: str, gradient: Any) -> Any:
        tensor = tf.convert_to_tensor(gradient)
        if tf.inside_function():
            traced(partial(self._send, title), [tensor], [])
        else:
            self._send(title, array_of(tensor))
        return gradient

    def _waited(self, title: str) -> tuple[bool, Array]:
        """Return whether there is a sum of the last step, and the sum."""
        (array,) = empty([self._kinds[title]])
        if title in self._read:
            raise BusyError(f"variable {title!r} was read twice in one step: use the tensor that the first read has "
                            "returned")
        self._read.add(title)
        if not self._sent:
            return False, array
        if len(self._sent) < len(self._kinds):  # the loss does not depend on the other variables
            self._gradients.zero_missing()
            self._sent = set(self._kinds)
        self._gradients.deliver(title, address_of(array), array.nbytes)
        return True, array

    def _send(self, title: str, array: Array) -> tuple[()]:
        if self._read:
            if self._sent:
                unread = [each for each in self._kinds if each not in self._read]
                if unread:
                    raise BusyError(f"variables {unread[:4]} of {len(unread)} were not read in this step: CrossBarrier "
                                    "updates each where it is read, so each is read in every step")
                self._close()
            self._read.clear()
        if title in self._sent:
            raise BusyError(f"a second gradient of {title!r} in one step: one tape and one loss make a step")
        self._sent.add(title)
        self._gradients.fill(title, address_of(array), array.nbytes)
        return ()  # `traced` calls functions that return arrays

    def _close(self) -> None:
        self._gradients.step()
        self._sent.clear()
        self._read.clear()


def _done(operation: Any) -> Any:
    with tf.control_dependencies([operation] if isinstance(operation, tf.Operation | tf.Tensor) else []):
        return tf.constant(True)
