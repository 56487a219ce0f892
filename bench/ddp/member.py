"""One rank of a process group of torch, by any backend."""
from __future__ import annotations

from bpsfast.bench.ddp.collectives import COLLECTIVES, expected
from bpsfast.bench.ddp.models import MODELS, batch, network
from bpsfast.bench.harness import pattern
from bpsfast.bench.harness.contestant import Operation


class Member:
    """One rank; the rendezvous is in the environment. Variants are the names of `MODELS` and `COLLECTIVES`."""

    def __init__(self, backend: str) -> None:
        import torch.distributed as dist

        import bpsfast.torch.backend  # noqa: F401

        self._dist = dist
        dist.init_process_group(backend)
        self.rank, self._size = dist.get_rank(), dist.get_world_size()
        self._losses: dict[str, list[float]] = {}

    def operation(self, variant: str, nbytes: int) -> Operation:
        """See the class."""
        return self._training(variant) if variant in MODELS else self._collective(variant, nbytes // 4)

    def _training(self, name: str) -> Operation:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(network(name), gradient_as_bucket_view=MODELS[name].views)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = self._losses[name] = []
        batches = [batch(name, self.rank, i) for i in range(8)]

        def run() -> None:
            optimizer.zero_grad()
            inputs, labels = batches[len(losses) % len(batches)]
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        return Operation(run, lambda known: None, lambda: 0)

    def _collective(self, name: str, n: int) -> Operation:
        call = COLLECTIVES[name](n)
        return Operation(
            call.run, lambda known: pattern.fill(call.given.numpy(), self.rank, known),
            lambda: int((call.found != expected(name, call, self.rank, self._size)).sum()))

    def losses(self) -> dict[str, list[float]]:
        """Return the losses of all steps so far, by model."""
        return self._losses

    def barrier(self) -> None:
        """Wait for the other ranks."""
        self._dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        self._dist.destroy_process_group()
