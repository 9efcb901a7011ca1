import pytest
import torch
from torch import nn

from mp_torch.emulate import emulate
from mp_torch.emulate.recurrent import gru_cell, lstm_cell

SHAPES = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"bias": False},
    {"num_layers": 2, "dropout": 0.5},
]


def layers(kind):
    for options in SHAPES + ([{"proj_size": 3}] if kind is nn.LSTM else []):
        yield kind(5, 4, **options).eval()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_fused_layers_agree_with_fp32_within_the_rounding_of_their_steps(kind):
    torch.manual_seed(0)
    for layer in layers(kind):
        x = torch.randn(6, 3, 5)
        single = layer(x)[0]
        with emulate("cuda", precision="fp16-mixed"):
            half = layer(x)[0]
        assert half.dtype == torch.float16
        assert half.shape == single.shape
        # values below 1; six steps and two layers add some three roundings of 2**-11 each, passed on undamped at worst
        assert (half - single).abs().max().item() <= 36 * 2.0**-11


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_weights_get_fp32_gradients_and_the_state_comes_back_in_16_bits(kind):
    for layer in layers(kind):
        with emulate("cuda", precision="bf16-mixed"):
            out, state = layer(torch.randn(6, 3, 5))
            out.float().sum().backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
        assert all(part.dtype == torch.bfloat16 for part in (state if isinstance(state, tuple) else [state]))


def test_a_layer_is_its_cell_step_by_step():
    torch.manual_seed(0)
    layer, cell = nn.LSTM(5, 4), nn.LSTMCell(5, 4)
    for name, parameter in cell.named_parameters():
        parameter.data = getattr(layer, f"{name}_l0").data
    x = torch.randn(6, 3, 5)
    with emulate("cuda", precision="fp16-mixed"), torch.no_grad():
        out = layer(x)[0]
        state = None
        for step, expected in zip(x, out, strict=True):
            state = cell(step, state)
            assert torch.equal(state[0], expected)


def test_a_model_in_16_bits_without_autocast_runs_fused_cells_too():
    torch.manual_seed(0)
    layer = nn.GRU(5, 4).half()
    x = torch.randn(6, 3, 5).half()
    plain = layer(x)[0]
    with emulate("cuda"):
        out = layer(x)[0]
        with torch.inference_mode():
            assert torch.equal(layer(x)[0], out)
    assert out.dtype == torch.float16
    assert not torch.equal(out, plain)


def test_dropout_between_layers_acts_in_training_only():
    torch.manual_seed(0)
    layer = nn.LSTM(5, 4, num_layers=2, dropout=0.5)
    x = torch.randn(6, 3, 5)
    with emulate("cuda", precision="fp16-mixed"), torch.no_grad():
        assert not torch.equal(layer(x)[0], layer(x)[0])
        layer.eval()
        assert torch.equal(layer(x)[0], layer(x)[0])


def test_fp32_layers_without_autocast_keep_torchs_own_bits():
    layer, x = nn.LSTM(5, 4), torch.randn(6, 3, 5)
    expected = layer(x)[0]
    with emulate("cuda"):
        assert torch.equal(layer(x)[0], expected)


def test_a_cell_rounds_its_outputs_and_nothing_before():
    torch.manual_seed(0)
    gates = [torch.randn(3, 16).half() for _ in range(2)]
    state = [torch.randn(3, 4).half() for _ in range(2)]
    hidden, cell = lstm_cell(gates, state)
    total = gates[0].double() + gates[1].double()
    enter, forget, candidate, leave = total.chunk(4, -1)
    wide = forget.sigmoid() * state[1].double() + enter.sigmoid() * candidate.tanh()
    assert (cell.double() - wide).abs().max() <= 2.0**-11 * wide.abs().max()
    assert (hidden.double() - leave.sigmoid() * wide.tanh()).abs().max() <= 2.0**-11
    gates = [torch.randn(3, 12).half() for _ in range(2)] + [torch.randn(12).half() for _ in range(2)]
    (with_biases,) = gru_cell(gates, state[:1])
    folded = [gates[0].float() + gates[2].float(), gates[1].float() + gates[3].float()]
    assert torch.equal(gru_cell(folded, state[:1])[0], with_biases)
