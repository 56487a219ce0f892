"""Gradients of which some are sparse, as those of `torch.nn.Embedding(sparse=True)`: their rows travel, and no others.

Which ones these are the first backward pass shows, on all ranks together: one that has not used an embedding has no
gradient of it. What comes back is sparse where the gradient was: coalesced, with the rows of all ranks.
"""
from __future__ import annotations

import weakref

import numpy as np
import torch

from ..base.dtypes import TABLE
from ..orchestration.errors import UnsupportedError
from ..orchestration.messages import TensorSpec
from ..trainer import process
from ..trainer.gradients import Gradients
from ..trainer.sparse_table import SparseTable
from .compression import CompressionLike
from .exchange import Exchange, retire_later


class SparseExchange(Exchange):
    """Averages the gradients of *named* parameters over all ranks, sparse ones row by row. Owner as `Exchange`.

    *sparse_as_dense*: sparse gradients travel as dense ones.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]], compression: CompressionLike, n_passes: int,
                 sparse_as_dense: bool) -> None:
        super().__init__(named, compression, n_passes)
        self._sparse_as_dense = sparse_as_dense
        self._sparse: list[str] = []  # on some rank, in the first step
        self._tables: dict[str, SparseTable] = {}

    def declare(self) -> Gradients:
        """Tell the job of the gradients; the first time, wait for all ranks to say which are sparse."""
        if self._gradients is None:
            self._sparse = self._sparse_anywhere()
            by_rows = [] if self._sparse_as_dense else self._sparse
            self._refuse_compressed(by_rows)
            self._order = [name for name in self.order() if name not in by_rows]
            self._gradients = self._declared(self._order)
            for name in by_rows:
                shape, dtype = self.kinds[name]
                table = self._tables[name] = SparseTable(process.current(), self.prefix + name, shape, dtype)
                weakref.finalize(self, retire_later, table, []).atexit = False
        return self._gradients

    def _sparse_anywhere(self) -> list[str]:
        """Return the names of gradients that are sparse on some rank, in an order that is that of all."""
        names = list(self.presence.places)  # of all parameters: ranks may have others frozen
        if not names:
            return []
        gradients = [self.parameters[name].grad if name in self.parameters else None for name in names]
        session = process.current()
        title = f"sparse of {self.prefix}{names[0]} to {names[-1]}, {len(names)} tensors"
        session.tensors.declare([TensorSpec(name=title, dtype="int32", shape=(len(names),), average=False)])
        unit = session.tensors.unit(title)
        staging = unit.staging
        staging.array[:unit.nbytes].view(np.int32)[:] = [each is not None and each.is_sparse for each in gradients]
        unit.push()
        unit.wait(unit.round, session.settings.timeout_s)
        n_ranks = unit.view(unit.round).view(np.int32).tolist()
        session.retire([unit])
        session.memory.release(staging)
        return [name for name, n in zip(names, n_ranks) if n]

    def _refuse_compressed(self, names: list[str]) -> None:
        for name in names:
            if name in self._contexts:
                raise UnsupportedError(f"the gradient of {name!r} is sparse, which a compressor of your own cannot "
                                       "compress: use sparse_as_dense=True, or Compression.none, .fp16, .bf16")
            if name in self.momenta:
                raise UnsupportedError(f"the gradient of {name!r} is sparse, to which no codec's momentum applies: "
                                       "use sparse_as_dense=True, or no codec for it")
            self.codecs.pop(name, None)  # rows that nobody has used are not sent as it is

    @property
    def busy(self) -> bool:
        """Whether gradients are under way: after backward, before the step."""
        return super().busy or any(table.busy for table in self._tables.values())

    def send_rest(self) -> None:
        """Send what no backward pass has sent: zeros where there is no gradient, no rows where it would be sparse."""
        self.begin()
        for name, table in self._tables.items():
            if not table.busy:
                self._push(name, self.parameters[name].grad)
        super().send_rest()

    def _send(self, name: str) -> None:
        gradient = self.parameters[name].grad
        assert gradient is not None, "only called for parameters with a gradient"
        if self._gradients is None and gradient.is_sparse:
            self._copies[name] = gradient.detach().clone()
        elif gradient.is_sparse or name in self._tables:
            self._fill(name, gradient)
        else:
            super()._send(name)

    def _fill(self, name: str, gradient: torch.Tensor) -> None:
        if name in self._tables:
            self._push(name, gradient)
        else:  # as all ranks said; or it was not used in the first step, and none said that it is sparse
            super()._fill(name, gradient.to_dense() if gradient.is_sparse else gradient)

    def _push(self, name: str, gradient: torch.Tensor | None) -> None:
        """Send the rows of *gradient*; None: there are none."""
        parameter, dtype = self.parameters[name], self._wire[name]
        if gradient is None:
            rows = torch.empty(0, *parameter.shape[1:], dtype=dtype)
            self._tables[name].push(np.empty(0, np.int64), rows)
            return
        gradient = gradient.detach() if gradient.is_sparse else gradient.detach().to_sparse(1)
        if gradient.sparse_dim() != 1:
            raise UnsupportedError(f"the gradient of {name!r} has {gradient.sparse_dim()} sparse dimensions; rows "
                                   "have one: use sparse_as_dense=True")
        self._tables[name].push(gradient._indices()[0].cpu().numpy(), gradient._values().to(dtype).contiguous().cpu())

    def receive(self) -> None:
        """As `Exchange.receive`."""
        self.hear()
        with torch.no_grad():
            for name in self._tables:
                self._receive_rows(name, self.parameters[name])
        super().receive()

    def _receive_rows(self, name: str, parameter: torch.Tensor) -> None:
        indices, rows = self._tables[name].wait()
        if parameter.grad is None and not self.presence.has(name):
            return
        bits = rows.view(np.int16) if rows.dtype == TABLE["bfloat16"].numpy else rows  # which NumPy has not
        values = torch.from_numpy(bits).view(self._wire[name]).to(parameter.device, parameter.dtype)
        total = torch.sparse_coo_tensor(torch.from_numpy(indices)[None].to(parameter.device), values, parameter.shape,
                                        check_invariants=False, is_coalesced=True)
        is_dense = parameter.grad is not None and not parameter.grad.is_sparse
        parameter.grad = total.to_dense() if is_dense else total

    def _receive(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None and not self.presence.has(name):
            return
        is_dense = gradient is not None and not gradient.is_sparse
        if is_dense or name not in self._sparse:  # dense on all ranks, where they have not agreed that it is sparse
            parameter.grad = gradient if is_dense else None
            super()._receive(name, parameter)
            return
        total = parameter.grad = torch.empty_like(parameter, requires_grad=False)
        super()._receive(name, parameter)
        parameter.grad = total.to_sparse(1 if gradient is None else gradient.sparse_dim())
