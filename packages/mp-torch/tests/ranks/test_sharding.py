"""Which modules travel together, and in which dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mp_torch.ranks.sharding import Unit, default_blocks, plan

LOW = torch.bfloat16
FULL = torch.float32


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 8)


def names(units: list[Unit], dtype: torch.dtype | None) -> list[str]:
    return [unit.name for unit in units if unit.dtype == dtype]


def test_norms_and_embeddings_travel_in_fp32_beside_layers_in_16_bits():
    net = Net()
    units = plan(net, lower=LOW, blocks=default_blocks(net))
    assert names(units, FULL) == ["layers.0.norm", "layers.1.norm", "token"]
    assert names(units, LOW) == ["layers.0", "layers.1", ""]


def test_the_model_comes_last_and_inner_units_before_outer_ones():
    units = plan(Net(), lower=LOW, blocks={"layers.0", "layers.1"})
    order = [unit.name for unit in units]
    assert order[-1] == ""
    assert order.index("layers.0.norm") < order.index("layers.0")


def test_a_module_that_the_rules_keep_in_fp32_travels_in_fp32():
    units = plan(Net(), lower=LOW, kept={"layers.1"}, blocks={"layers.0", "layers.1"})
    assert {"layers.1.up", "layers.1.down", "layers.1.norm"} <= set(names(units, FULL))


def test_a_parameter_of_the_layer_itself_keeps_the_layer_in_fp32_and_its_linears_apart():
    net = Net()
    net.layers[0].scale = nn.Parameter(torch.ones(4))
    units = plan(net, lower=LOW, blocks=default_blocks(net))
    assert "layers.0" in names(units, FULL)
    assert {"layers.0.up", "layers.0.down"} <= set(names(units, LOW))


def test_nothing_travels_otherwise_than_stored_where_no_lower_dtype_is_given():
    units = plan(Net(), lower=None, blocks={"layers.0"})
    assert units == [Unit("layers.0", FULL), Unit("", FULL)]


def test_16_bit_layers_and_fp32_norms_of_one_model_are_told_apart_by_what_is_stored():
    net = Net().to(LOW)
    for layer in net.layers:
        layer.norm.float()
    units = plan(net, lower=None, blocks=default_blocks(net))
    assert names(units, FULL) == ["layers.0.norm", "layers.1.norm"]
    assert names(units, LOW) == ["layers.0", "layers.1", ""]


def test_attention_whose_projection_is_used_without_being_called_is_one_unit():
    net = nn.Sequential(nn.MultiheadAttention(4, 2), nn.LayerNorm(4))
    assert [unit.name for unit in plan(net, lower=LOW, blocks={"0"})] == ["0", "1", ""]


@pytest.mark.parametrize("blocks", [set(), {"layers.0"}, {"layers.0", "layers.1"}])
def test_every_parameter_is_in_a_unit_of_one_dtype(blocks):
    net = Net()
    units = plan(net, lower=LOW, blocks=blocks)
    taken: dict[str, str] = {}
    modules = dict(net.named_modules())
    for unit in units:
        prefix = f"{unit.name}." if unit.name else ""
        for name, _ in modules[unit.name].named_parameters():
            taken.setdefault(prefix + name, unit.name)
    dtypes = {unit.name: unit.dtype for unit in units}
    for name, _ in net.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        assert dtypes[taken[name]] == (LOW if isinstance(owner, nn.Linear) else FULL), name
