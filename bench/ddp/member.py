"""One rank of `bench ddp`: trains models and runs collectives in a torch process group, with any backend."""
from __future__ import annotations

from bpsfast.bench.ddp import collectives
from bpsfast.bench.ddp.models import MODELS, batch, network
from bpsfast.bench.harness import pattern
from bpsfast.bench.harness.contestant import GroupMember, Operation


class Member(GroupMember):
    """One rank. The variants of `operation` are the names of `MODELS` and `COLLECTIVES`."""

    def __init__(self, backend: str) -> None:
        import bpsfast.torch.backend  # noqa: F401

        super().__init__(backend)
        self._losses: dict[str, list[float]] = {}

    def operation(self, variant: str, nbytes: int) -> Operation:
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
        call = collectives.call(name, n)
        return Operation(
            call.run, lambda known: pattern.fill(call.given.numpy(), self.rank, known),
            lambda: int((call.found != collectives.expected(name, call, self.rank, self.size)).sum()))

    def losses(self) -> dict[str, list[float]]:
        """Return the losses of all steps so far for each model."""
        return self._losses
