"""The memory estimate of a rank is what the fullest rank of a real sharded run holds."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mp_torch import AmpConfigError, AmpEngine, memory_estimate
from mp_torch.ranks import local

ROLES = ("weights", "masters", "gradients", "moments")


def model():
    """First dimensions that two and four ranks do not divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 5))


def size(tensors):
    return sum(local(one).numel() * one.element_size() for one in tensors)


def held_by_a_rank(precision, layout):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine = AmpEngine(net, optimizer, precision=precision)
    call = engine.replicate() if layout == "none" else net
    if layout == "fsdp":
        engine.shard()
    for window in range(2):
        with engine.autocast():
            loss = call(torch.ones(4, 3)).float().sum()
        engine.backward(loss)
        if window == 0:
            assert engine.step().applied
    states = [one for state in optimizer.state.values() for key, one in state.items() if key != "step"]
    return {
        "weights": size(one.detach() for one in net.parameters()),
        "masters": size(one for part in engine.assembly.parts for one in part.weight.state().values()),
        "gradients": size(engine.gradients().values()),
        "moments": size(states),
    }


@pytest.mark.parametrize("layout", ["none", "fsdp"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true", "bf16-kahan"])
def test_the_fullest_rank_holds_what_was_estimated(pool, precision, world, layout):
    measured = pool.run(held_by_a_rank, world, precision, layout)
    estimate = memory_estimate(model(), precision, "adamw", ranks=world, sharding=layout)
    fullest = {role: max(one[role] for one in measured) for role in ROLES}
    assert fullest == {role: getattr(estimate, role) for role in ROLES}
    if layout == "fsdp":
        whole = memory_estimate(model(), precision, "adamw")
        assert sum(one["moments"] for one in measured) == whole.moments  # the ranks together hold everything once


def even_model():
    """First dimensions that two and four ranks divide: ZeRO's parts of the whole and FSDP2's of each tensor agree."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def bytes_through_a_step(precision, reshard):
    """Weights gathered between forward and backward, weights held throughout, and the other roles of this rank."""
    net = even_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine = AmpEngine(net, optimizer, precision=precision)
    engine.shard(blocks=["0", "1", "2"], reshard_after_forward=reshard)
    with engine.autocast():
        loss = net(torch.ones(4, 8)).float().sum()
    gathered = size(one.detach() for one in net.parameters() if not isinstance(one, DTensor))
    engine.backward(loss)
    gradients = size(engine.gradients().values())
    engine.step()
    return gathered, {
        "weights": size(one.detach() for one in net.parameters()),
        "masters": size(one for part in engine.assembly.parts for one in part.weight.state().values()),
        "gradients": gradients,
        "moments": size(one for state in optimizer.state.values() for key, one in state.items() if key != "step"),
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_shards_hold_zero_3_and_between_forward_and_backward_the_whole_weights_of_zero_2_if_asked(
    pool, precision, world
):
    sharded = memory_estimate(even_model(), precision, "adamw", ranks=world, sharding="zero3")
    kept = memory_estimate(even_model(), precision, "adamw", ranks=world, sharding="zero2")
    for gathered, held in pool.run(bytes_through_a_step, world, precision, True):
        assert (gathered, held) == (0, {role: getattr(sharded, role) for role in ROLES})
    for gathered, held in pool.run(bytes_through_a_step, world, precision, False):
        assert gathered == kept.weights
        assert held == {role: getattr(sharded if role == "weights" else kept, role) for role in ROLES}


def whole_gradients_within_a_window(precision):
    net = even_model()
    engine = AmpEngine(net, torch.optim.AdamW(net.parameters(), lr=1e-3), precision=precision, accumulate_steps=2)
    engine.shard(blocks=["0", "1", "2"])
    found = []
    for _ in range(2):
        with engine.autocast():
            loss = net(torch.ones(4, 8)).float().sum()
        engine.backward(loss)
        waiting = [one for layer in net for one in fully_shard.state(layer)._fsdp_param_group.fsdp_params]
        kept = [one.unsharded_accumulated_grad for one in waiting if one.unsharded_accumulated_grad is not None]
        kept += [one._unsharded_param.grad for one in waiting if one._unsharded_param.grad is not None]
        found.append(size(kept))
    return found, size(engine.gradients().values())


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_shards_hold_whole_gradients_from_one_micro_step_to_the_next_as_zero_1_does(pool, precision):
    whole = memory_estimate(even_model(), precision, "adamw", ranks=2, sharding="zero1", accumulate="fp32")
    parts = memory_estimate(even_model(), precision, "adamw", ranks=2, sharding="zero2")
    for found, gradients in pool.run(whole_gradients_within_a_window, 2, precision):
        assert found == [whole.gradients, 0]
        assert gradients == parts.gradients


def zero_1(parameters):
    """Torch's own ZeRO-1, which gives whole tensors to ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what torch itself imports
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-3)


def moments_of_zero_1():
    net = model()
    optimizer = zero_1(net.parameters())
    net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return size(one for state in optimizer.optim.state.values() for key, one in state.items() if key != "step")


@pytest.mark.parametrize("world", [2, 4])
def test_torch_s_zero_1_holds_the_estimate_up_to_one_whole_tensor(pool, world):
    measured = pool.run(moments_of_zero_1, world)
    estimate = memory_estimate(model(), "fp32", "adamw", ranks=world, sharding="zero1").moments
    largest = 2 * max(one.numel() * one.element_size() for one in model().parameters())
    assert sum(measured) == memory_estimate(model(), "fp32", "adamw").moments
    assert estimate <= max(measured) <= estimate + largest


def refused():
    net = model()
    try:
        AmpEngine(net, zero_1(net.parameters()), "bf16-true")
    except AmpConfigError as error:
        return str(error)
    return "accepted"


def test_an_optimizer_whose_moments_checkpoints_would_miss_is_refused_with_the_way_out(pool):
    for message in pool.run(refused, 2):
        assert message.startswith("ZeroRedundancyOptimizer keeps its moments in another optimizer inside it")
        assert "engine.shard(reshard_after_forward=False), which divides masters, moments and gradients" in message
