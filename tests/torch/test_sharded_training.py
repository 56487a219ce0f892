"""FSDP2, HSDP, DTensor, checkpoints, pipelines and local SGD give the same results over gloo and over "bpsfast"."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.matrix

N_STEPS = 6
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Block(torch.nn.Module):
    """Two layers; their sizes are not multiples of the number of ranks."""

    def __init__(self, width=30, hidden=51):
        super().__init__()
        self.up = torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def network(n_blocks=2, **sizes):
    torch.manual_seed(11)
    return torch.nn.Sequential(*(Block(**sizes) for _ in range(n_blocks)))


def batch(step, rank, width=30):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(model, rank=None, optimizer=None, n_steps=N_STEPS):
    """Train on the batches of *rank*; return the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(n_steps):
        optimizer.zero_grad()
        loss = model(batch(step, dist.get_rank() if rank is None else rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(model):
    """The weights of a sharded model, all of them."""
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).detach().double().reshape(-1)
                      for p in model.parameters()]).numpy()


def sharded(model, **options):
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def single_process():
    """The same in one process: the mean of all ranks' losses."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        sum(model(batch(step, rank)).square().mean() / dist.get_world_size()
            for rank in range(dist.get_world_size())).backward()
        optimizer.step()
    return whole(model)


# -- programs ----------------------------------------------------------------------------------------------------------


def fsdp(reshards):
    model = sharded(network(), reshard_after_forward=reshards)
    return trained(model), whole(model), single_process()


def fsdp_in_bfloat16():
    model = sharded(network(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return trained(model), whole(model)


def hsdp():
    """Replicas of two ranks each; each replica shards the model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(network(), mesh=mesh)
    return trained(model), whole(model), single_process()


def redistributed():
    """A tensor through all placements and back."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.arange(7 * 5, dtype=torch.float64).reshape(7, 5)
    found = [distribute_tensor(x, mesh, [Shard(0)])]
    for placement in (Shard(1), Replicate(), Shard(1), Shard(0), Replicate()):
        found.append(found[-1].redistribute(placements=[placement]))
    partial = DTensor.from_local(x * (dist.get_rank() + 1), mesh, [Partial()])
    found += [partial.redistribute(placements=[each]) for each in (Replicate(), Shard(0), Shard(1))]
    product = found[0] @ found[2].T
    return [each.full_tensor().numpy() for each in (*found, product)], x.numpy()


def tensor_parallel():
    """The blocks' layers cut by columns and rows, as in Megatron; all ranks see the same batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network(width=32, hidden=64)
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, 0, width=32)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, whole(model)


def checkpointed(folder):
    """Train, save, continue; a fresh model that loads the checkpoint and continues must give the same result."""
    model = sharded(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, optimizer=optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    trained(model, optimizer=optimizer)

    other = sharded(network())
    others_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    weights, state = get_state_dict(other, others_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(other, others_optimizer, model_state_dict=weights, optim_state_dict=state)
    trained(other, optimizer=others_optimizer)
    return whole(model), whole(other)


def checkpointed_meanwhile(folder):
    """Save a sharded model by a thread, over a group of its own, while the next step trains; return what was saved."""
    model = sharded(network())
    trained(model, n_steps=1)
    mine = dist.new_group()
    before = whole(model)
    saving = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder, process_group=mine)
    trained(model, n_steps=2)
    saving.result()
    fresh = sharded(network())
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state["model"])
    return before, whole(fresh), whole(model)


def states_of_rank_0():
    """Distribute rank 0's full states of a model and its optimizer; return what arrived, and the original."""
    from torch.distributed.checkpoint import state_dict as states

    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    given = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = sharded(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, optimizer=optimizer, n_steps=2)
    found, kept = states.get_state_dict(model, optimizer, options=options)
    wanted = whole(model)
    fresh = sharded(network())
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(dist.get_rank() + 3)
    again = torch.optim.AdamW(fresh.parameters(), lr=0.01)
    is_first = dist.get_rank() == 0
    states.set_model_state_dict(fresh, found if is_first else {}, options=given)
    states.set_optimizer_state_dict(fresh, again, kept if is_first else {}, options=given)
    arrived = whole(fresh)
    trained(model, optimizer=optimizer, n_steps=1)
    trained(fresh, optimizer=again, n_steps=1)
    return wanted, arrived, whole(model), whole(fresh)


def as_asked():
    """Return a group's answers to the questions of torch's own code and of libraries."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    backend = group._get_backend(cpu)
    c10d = dist.distributed_c10d
    try:
        group._get_backend(torch.device("meta"))
        meta = "is taken"
    except RuntimeError as exc:
        meta = type(exc).__name__
    return [[str(each) for each in group._device_types], backend.size(), backend.rank(), meta,
            str(c10d._get_pg_default_device(group)), str(c10d._get_object_coll_device(group)),
            c10d._device_capability(group),
            group.bound_device_id, dist.get_pg_count(), dist.get_process_group_ranks(group),
            dist.get_backend_config().count("cpu:")]


def diloco():
    """DiLoCo: pairs of ranks train by DDP on their own; every third step the pairs' moves are averaged across pairs,
    and an outer optimizer makes them."""
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = DistributedDataParallel(network(), process_group=mesh.get_group("inner"))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    anchor = copy.deepcopy(model.module)
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    losses = []
    for _ in range(3):
        losses += trained(model, optimizer=inner, n_steps=3)
        works = []
        for kept, moved in zip(anchor.parameters(), model.parameters()):
            kept.grad = kept.detach() - moved.detach()
            works.append(dist.all_reduce(kept.grad, op=dist.ReduceOp.AVG, group=mesh.get_group("outer"), async_op=True)
                         if dist.get_backend() == "bpsfast" else dist.all_reduce(kept.grad.div_(2), async_op=True,
                                                                                 group=mesh.get_group("outer")))
        for work in works:
            work.wait()
        outer.step()
        with torch.no_grad():
            for kept, moved in zip(anchor.parameters(), model.parameters()):
                moved.copy_(kept)
    return losses, whole(model)


def pipelined():
    """GPipe: a stage on each rank, microbatches by send and receive."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, size = dist.get_rank(), dist.get_world_size()
    stages = network(n_blocks=size)
    stage = PipelineStage(stages[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    x, y = (torch.randn(8, 30, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    losses: list[torch.Tensor] = []
    schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == size - 1 else {}))
    gradients = torch.cat([p.grad.reshape(-1) for p in stages[rank].parameters()])
    return [loss.item() for loss in losses], gradients.numpy()


def compiled():
    """A compiled model that contains a functional collective, which is part of the graph."""
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD

    def total(x):
        return functional.all_reduce(x * 2, "sum", group) + 1

    x = torch.arange(6.0) + dist.get_rank()
    eager = total(x)
    graph = torch.compile(total, backend="aot_eager", fullgraph=True)(x)
    gathered = functional.all_gather_tensor(x, 0, group)
    scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
    return [each.numpy() for each in (eager, graph, gathered + 0, scattered + 0)]


# -- tests -------------------------------------------------------------------------------------------------------------


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), **CLOSE)


@pytest.mark.parametrize(("size", "nodes", "reshards"), [(2, 1, True), (2, 2, False), (4, 2, True), (4, 1, False)])
def test_fsdp(torch_ranks, size, nodes, reshards):
    for gloo, ours in torch_ranks(size, nodes).compare(fsdp, reshards):
        assert_close(ours, gloo)
        assert_close([ours[1]], [ours[2]])


def test_fsdp_in_mixed_precision(torch_ranks):
    for gloo, ours in torch_ranks(2).compare(fsdp_in_bfloat16):
        assert_close(ours, gloo)


def test_hsdp(torch_ranks):
    for gloo, ours in torch_ranks(4, 2).compare(hsdp):
        assert_close(ours, gloo)
        assert_close([ours[1]], [ours[2]])


@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (4, 2)])
def test_dtensors_are_redistributed(torch_ranks, size, nodes):
    for (gloo, _), (ours, x) in torch_ranks(size, nodes).compare(redistributed):
        assert all((a == b).all() for a, b in zip(gloo, ours, strict=True))
        assert all((each == x).all() for each in ours[:6])
        assert all((each == x * sum(range(1, size + 1))).all() for each in ours[6:9])


@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (4, 2)])
def test_tensor_parallel(torch_ranks, size, nodes):
    for gloo, ours in torch_ranks(size, nodes).compare(tensor_parallel):
        assert_close(ours, gloo)


@pytest.mark.parametrize("size", [2, 4])
def test_a_checkpoint_is_saved_and_loaded(torch_ranks, size):
    ranks = torch_ranks(size)
    for saved, loaded in ranks.grouped(checkpointed, ranks.new_path()):
        assert (saved == loaded).all()


@pytest.mark.timeout(200)
def test_a_checkpoint_is_saved_while_the_model_trains(torch_ranks, tmp_path):
    for before, loaded, after in torch_ranks(2).grouped(checkpointed_meanwhile, str(tmp_path)):
        assert (before == loaded).all() and (before != after).any()


@pytest.mark.timeout(200)
def test_states_go_out_from_rank_0(torch_ranks):
    for gloos, ours in torch_ranks(2).compare(states_of_rank_0):
        assert (ours[0] == ours[1]).all() and all((a == b).all() for a, b in zip(gloos, ours, strict=True))


def test_a_group_answers_as_gloos(torch_ranks):
    for gloo, ours in torch_ranks(2).compare(as_asked):
        assert gloo == ours


def test_diloco(torch_ranks):
    pairs = torch_ranks(4, 2).compare(diloco)
    for gloo, ours in pairs:
        assert_close(ours, gloo)
        assert (ours[1] == pairs[0][1][1]).all()


@pytest.mark.parametrize(("size", "nodes"), [(2, 2), (3, 1)])
def test_a_pipeline(torch_ranks, size, nodes):
    for gloo, ours in torch_ranks(size, nodes).compare(pipelined):
        assert_close(ours, gloo)


def test_functional_collectives_in_a_compiled_function(torch_ranks):
    for gloo, ours in torch_ranks(2).compare(compiled):
        assert all((a == b).all() for a, b in zip(gloo, ours, strict=True))
        assert (ours[0] == ours[1]).all()
