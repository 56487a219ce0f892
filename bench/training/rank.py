"""One rank of `bench model`: trains one model with one backend."""
from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch

from bpsfast.bench.harness.contestant import Operation
from bpsfast.bench.training import samples
from bpsfast.bench.training.backends import BACKENDS
from bpsfast.bench.training.models import shape_of
from bpsfast.orchestration.errors import ConfigError

_LEARNING_RATE, _MOMENTUM = 0.01, 0.9
_SEED = 20


class TrainingRank:
    """One rank that trains; *backend*, a key of `backends.BACKENDS`, joins the job that the environment describes.

    *model*, *size*: see `models.shape_of`; *batch*: samples of this rank in a step; *device*: "cpu" (one thread) or
    "cuda" (the GPU with this local rank's number); *data*: path of a real set (`samples.real`), "" for a synthetic one.
    """

    def __init__(self, model: str, size: str, backend: str, batch: int, device: str, data: str = "") -> None:
        self._backend = BACKENDS[backend]()
        self.rank, self.size = self._backend.rank, self._backend.size
        if device == "cuda":
            number = self._backend.local_rank % torch.cuda.device_count()
            torch.cuda.set_device(number)
            device = f"cuda:{number}"
        else:
            torch.set_num_threads(1)
        torch.manual_seed(_SEED)
        shape = shape_of(model, size)
        with torch.device(device):
            net = shape.make()
        self._parameters = list(net.parameters())
        optimizer = torch.optim.SGD(self._parameters, lr=_LEARNING_RATE, momentum=_MOMENTUM)
        self._net, self._optimizer = self._backend.distributed(net, optimizer)
        self._batches = (samples.real(Path(data), shape, batch, self.rank, self.size, device) if data else
                         samples.synthetic(shape, batch, self.rank, device))
        self.losses: list[float] = []

    def step(self) -> None:
        """Make one step, and wait for its loss."""
        inputs, labels = next(self._batches)
        self._optimizer.zero_grad()
        loss = self._net(inputs, labels)
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())
        if not math.isfinite(self.losses[-1]):
            raise ConfigError(f"the loss of step {len(self.losses)} on rank {self.rank} is {self.losses[-1]}")

    def operation(self, variant: str, nbytes: int) -> Operation:
        """Return a step; *variant* has no effect, and `digest` shows wrong sums."""
        return Operation(self.step, lambda known: None, lambda: 0)

    def digest(self) -> tuple[int, str]:
        """Return the number of steps so far, and a hash of all weights."""
        found = hashlib.sha256()
        for weight in self._parameters:
            found.update(weight.detach().cpu().numpy().tobytes())
        return len(self.losses), found.hexdigest()

    def losses_so_far(self) -> list[float]:
        """Return the losses of all steps so far."""
        return self.losses

    def barrier(self) -> None:
        """Wait for the other ranks."""
        self._backend.barrier()

    def close(self) -> None:
        """Leave the job."""
        self._backend.close()
