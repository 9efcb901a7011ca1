import pytest
import torch
from torch import nn

from mp_torch.emulate import EmulationWarning, emulate

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


def test_a_batch_first_layer_returns_torch_s_layout_which_decides_how_the_next_layer_rounds():
    with emulate("cuda", precision="fp16-mixed"):
        out = nn.LSTM(5, 4, batch_first=True)(torch.randn(3, 6, 5))[0]
    assert out.shape == (3, 6, 4)
    assert not out.is_contiguous()
    assert out.transpose(0, 1).is_contiguous()


def test_float64_cells_are_fused_without_losing_bits():
    torch.manual_seed(0)
    cell, x = nn.LSTMCell(5, 4).double(), torch.randn(3, 5).double()
    expected = cell(x)
    with emulate("cuda"):
        found = cell(x)
    for have, want in zip(found, expected, strict=True):
        assert torch.allclose(have, want, rtol=0, atol=8 * 2.0**-53)


def test_fp32_layers_without_autocast_keep_torchs_own_bits():
    layer, x = nn.LSTM(5, 4), torch.randn(6, 3, 5)
    expected = layer(x)[0]
    with emulate("cuda"):
        assert torch.equal(layer(x)[0], expected)


def cells(kind):
    torch.manual_seed(0)
    width = 4 if kind == "lstm" else 3
    gates = [torch.randn(3, width * 4).half() for _ in range(2)]
    biases = [torch.randn(width * 4).half() for _ in range(2)]
    return gates, torch.randn(3, 4).half(), biases


def wide_lstm(ours, theirs, cx, b_1, b_2):
    enter, forget, candidate, leave = (ours + theirs + b_1 + b_2).chunk(4, -1)
    cell = forget.sigmoid() * cx + enter.sigmoid() * candidate.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def wide_gru(ours, theirs, hx, b_1, b_2):
    (r_1, u_1, n_1), (r_2, u_2, n_2) = (ours + b_1).chunk(3, -1), (theirs + b_2).chunk(3, -1)
    candidate = (n_1 + (r_1 + r_2).sigmoid() * n_2).tanh()
    return (candidate + (u_1 + u_2).sigmoid() * (hx - candidate),)


@pytest.mark.parametrize(("kind", "wide"), [("lstm", wide_lstm), ("gru", wide_gru)])
def test_a_cell_and_its_gradients_are_those_of_its_equations_but_for_one_rounding_of_what_is_kept(kind, wide):
    gates, state, biases = cells(kind)
    values = [*gates, state, *biases]

    def run(cell, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in values]
        outputs = cell(*inputs)
        return [*outputs, *torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs])]

    with emulate("cuda"):
        op = getattr(torch.ops.aten, f"_thnn_fused_{kind}_cell")
        found = run(lambda *inputs: op(*inputs)[: 2 if kind == "lstm" else 1], torch.float16)
    for have, want in zip(found, run(wide, torch.float64), strict=True):
        assert have.dtype == torch.float16
        # results below 4 rounded once, gradients from gates of relative error 2**-11 in at most four factors and a
        # sum of three rows
        assert (have.double() - want).abs().max().item() <= 3 * 6 * 4 * 2.0**-11
        assert have.abs().max() > 0


def test_a_cell_s_gradient_may_come_from_one_of_its_outputs_alone():
    gates, state, _ = cells("lstm")
    with emulate("cuda"):
        for place in range(2):
            inputs = [x.clone().requires_grad_() for x in (*gates, state)]
            torch.ops.aten._thnn_fused_lstm_cell(*inputs)[place].sum().backward()
            assert all(x.grad.abs().sum() > 0 for x in inputs)


def test_without_an_emulation_torch_has_no_fused_cell_for_cpu_tensors():
    gates, state, _ = cells("gru")
    with pytest.raises(NotImplementedError, match="_thnn_fused_gru_cell"):
        torch.ops.aten._thnn_fused_gru_cell(*gates, state)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_a_packed_sequence_says_that_it_runs_in_fp32(kind):
    layer, x = kind(4, 8, batch_first=True), torch.randn(2, 5, 4)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, [5, 3], batch_first=True)
    with (
        emulate("cuda"),
        torch.autocast("cpu", torch.float16),
        pytest.warns(EmulationWarning, match=r"aten::\w+\.data takes a packed sequence, which is not emulated; cast"),
    ):
        assert layer(packed)[0].data.dtype == torch.float32
