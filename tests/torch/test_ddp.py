"""DistributedDataParallel of torch over the backend "bpsfast" gives the results that gloo gives."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.matrix

SHAPES = [(2, 1), (2, 2), (3, 1), (4, 2)]
N_STEPS = 10


class Network(torch.nn.Module):
    """A convolution with BatchNorm, and two layers; each batch uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
                                            torch.nn.Flatten())
        self.left = torch.nn.Linear(4 * 36, 300)
        self.right = torch.nn.Linear(4 * 36, 300)
        self.head = torch.nn.Linear(300, 10)

    def forward(self, x, way="both"):
        x = self.features(x)
        hidden = 0
        if way != "right":
            hidden = hidden + self.left(x)
        if way != "left":
            hidden = hidden + self.right(x)
        return self.head(hidden)


def network():
    torch.manual_seed(7 + dist.get_rank())  # DDP must make them equal
    return Network()


def batch(step, n=6):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(n, 1, 8, 8, generator=generator)
    return x, x[:, 0, 1:3, :5].flatten(1).argmax(1)


def loss_of(model, step, **how):
    x, y = batch(step)
    return torch.nn.functional.cross_entropy(model(x, **how), y)


def flat(tensors):
    """Return all values, for comparison."""
    return torch.cat([torch.zeros(0), *(value.detach().double().reshape(-1) for value in tensors)]).numpy()


def trained(model, optimizer=None, n_steps=N_STEPS, loss=loss_of):
    """Train; return the losses, the final buffers, which are the rank's own, and the weights."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(n_steps):
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, flat(model.buffers()), flat(model.parameters())


def assert_same(pairs, exact, tolerance=1e-4):
    """The backends' results agree: to the bit with two ranks, whose sums have only one order, otherwise closely."""
    for gloo, ours in pairs:
        for a, b in zip(gloo, ours, strict=True):
            if exact:
                assert (torch.as_tensor(a) == torch.as_tensor(b)).all()
            else:
                torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=tolerance, atol=tolerance)
    for states in zip(*pairs):
        assert all((state[-1] == states[0][-1]).all() for state in states), "weights of the ranks of one backend differ"


# -- programs ----------------------------------------------------------------------------------------------------------


def plain(n_steps=N_STEPS, **options):
    return trained(DistributedDataParallel(network(), **options), n_steps=n_steps)


def accumulating():
    """Three micro-batches a step, of which the last one exchanges."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.1)

    def loss(model, step):
        for micro in range(2):
            with model.no_sync():
                loss_of(model, 3 * step + micro).backward()
        return loss_of(model, 3 * step + 2)

    return trained(model, loss=loss)


def uneven(throws=False):
    """Ranks have 3, 4, ... batches: finished ranks take part in the others' calls (join)."""
    model = DistributedDataParallel(network(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with model.join(throw_on_early_termination=throws):
        for step in range(3 + dist.get_rank()):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, flat(model.parameters())


def unused():
    """Each rank uses another layer; in another step the ranks' layers do not overlap."""
    model = DistributedDataParallel(network(), find_unused_parameters=True)
    ways = ("left", "right", "both")
    return trained(model, loss=lambda model, step: loss_of(model, step, way=ways[(step + dist.get_rank()) % 3]))


def static():
    """The same graph in all steps, with a layer that is never used, and an activation that is computed twice."""
    model = DistributedDataParallel(network(), static_graph=True)
    return trained(model, loss=lambda model, step: loss_of(model, step, way="left"))


def autocast():
    model = DistributedDataParallel(network())

    def loss(model, step):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, step)

    return trained(model, loss=loss)


def float_of(dtype):
    """A model whose tensors are all of *dtype*."""
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(),
                                                        torch.nn.Linear(64, 4)).to(getattr(torch, dtype)))

    def loss(model, step):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        return model(torch.randn(5, 16, generator=generator).to(getattr(torch, dtype))).float().square().mean()

    return trained(model, loss=loss)


def sparse_embedding():
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 2)))

    def loss(model, step):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        return model(torch.randint(50, (9,), generator=generator)).square().mean()

    return trained(model, torch.optim.SGD(model.parameters(), lr=0.5), loss=loss)


BUILTIN = {"allreduce in C++": dist.BuiltinCommHookType.ALLREDUCE,
           "fp16 in C++": dist.BuiltinCommHookType.FP16_COMPRESS}


def hooked(name):
    """With one of torch's communication hooks."""
    # PowerSGD's futures make further calls: with several buckets they have no order that all ranks share but NCCL's.
    model = DistributedDataParallel(network(), bucket_cap_mb=25 if name == "powerSGD" else 0.1,
                                    gradient_as_bucket_view=name == "allreduce")
    optimizer = None
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2,
                                            min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name == "post-localSGD":
        from torch.distributed.optim import PostLocalSGDOptimizer  # here, for it warns of its own imports

        alone, _ = dist.new_subgroups(1)
        state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=3)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                          PeriodicModelAverager(period=3, warmup_steps=3))
    elif name in BUILTIN:
        model._register_builtin_comm_hook(BUILTIN[name])
    else:
        hooks = {"allreduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook,
                 "fp16 around": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)}
        model.register_comm_hook(None, hooks[name])
    return trained(model, optimizer)


def zero_optimizer():
    """The optimizer's state is divided among the ranks, and each rank broadcasts its share."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here, for it warns of its own imports

    model = DistributedDataParallel(network(), bucket_cap_mb=0.1)
    return trained(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9))


def on_halves():
    """Two models, each trained by its own group of two ranks, at the same time; then one by all."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = trained(DistributedDataParallel(network(), process_group=groups[rank // 2]), n_steps=4)
    whole = trained(DistributedDataParallel(network()), n_steps=4)
    return half[0], whole[0], whole[2]


def refused():
    """torch's errors for SyncBatchNorm on the CPU, and for hooks that need NCCL."""
    said = []
    for model, hook in ((torch.nn.SyncBatchNorm.convert_sync_batchnorm(Network()), None),
                        (Network(), default_hooks.bf16_compress_hook)):
        try:
            model = DistributedDataParallel(model)
            if hook is not None:
                model.register_comm_hook(None, hook)
            model(batch(0)[0])
            said.append("no error")
        except (RuntimeError, ValueError, TypeError) as exc:
            said.append(str(exc))
    return said


def other_model_on_rank_1():
    torch.manual_seed(0)
    DistributedDataParallel(torch.nn.Linear(4, 4 + dist.get_rank()))


# -- tests -------------------------------------------------------------------------------------------------------------


def test_fifty_steps_have_gloos_losses_to_the_bit(torch_ranks):
    pairs = torch_ranks(2).compare(plain, 50)
    assert_same(pairs, exact=True)
    losses = pairs[0][1][0]
    assert len(losses) == 50 and sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize(("size", "nodes"), SHAPES)
def test_many_buckets(torch_ranks, size, nodes):
    assert_same(torch_ranks(size, nodes).compare(small_buckets), exact=size == 2)


def small_buckets():
    return plain(bucket_cap_mb=0.05, gradient_as_bucket_view=True)


@pytest.mark.parametrize("program", [accumulating, unused, static, autocast, sparse_embedding, zero_optimizer])
@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (3, 1)])
def test_programs(torch_ranks, program, size, nodes):
    assert_same(torch_ranks(size, nodes).compare(program), exact=size == 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_models_of_other_dtypes(torch_ranks, dtype):
    assert_same(torch_ranks(2, 2).compare(float_of, dtype), exact=True)


@pytest.mark.parametrize("name", ["allreduce", "fp16", "fp16 around", "powerSGD", "post-localSGD", *BUILTIN])
def test_communication_hooks(torch_ranks, name):
    assert_same(torch_ranks(2).compare(hooked, name), exact=True)


@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (3, 1)])
def test_ranks_with_fewer_batches_join_early(torch_ranks, size, nodes):
    pairs = torch_ranks(size, nodes).compare(uneven)
    assert_same(pairs, exact=size == 2)
    assert [len(ours[0]) for _, ours in pairs] == [3 + rank for rank in range(size)]


def test_early_end_can_be_an_error_on_all_ranks(torch_ranks):
    for outcome in torch_ranks(2).attempt_grouped(uneven, True):
        assert outcome.error == "RuntimeError" and "exhausted" in outcome.text


def test_two_halves_train_beside_each_other(torch_ranks):
    pairs = torch_ranks(4, 2).compare(on_halves)
    assert all(gloo[0] == ours[0] for gloo, ours in pairs), "two ranks: to the bit"
    assert_same(pairs, exact=False)


def test_what_torch_refuses_is_refused_alike(torch_ranks):
    for gloo, ours in torch_ranks(2).compare(refused):
        assert gloo == ours and ours[0] != "no error"
        assert (ours[1] == "no error") is (torch.version.cuda is not None), "with CUDA any group may have the hook"


def test_models_that_differ_are_told(torch_ranks):
    first, second = torch_ranks(2).attempt_grouped(other_model_on_rank_1)
    assert "appears not to match sizes of the same param in process 0" in second.text
    assert first.error == "DistBackendError" and "rank 1" in first.text
