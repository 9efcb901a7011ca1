"""The memory estimate of a rank is what the fullest rank of a real sharded run holds."""

import pytest
import torch
from torch import nn

from mp_torch import AmpEngine, memory_estimate
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
