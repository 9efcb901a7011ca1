import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import mp_reference as mp
from mp_torch.emulate import ARITHMETICS, emulate
from mp_torch.emulate.arithmetic import FORMATS, EmulatedArithmetic, FastArithmetic, from_numpy, to_numpy
from mp_torch.errors import AmpConfigError

HALVES = [torch.float16, torch.bfloat16]
CHOICES = [
    {"arithmetic": "fast"},
    {"arithmetic": "tensor-core", "arch": "ampere"},
    {"arithmetic": "fp16-accumulate"},
    {"arithmetic": "exact"},
]


def integers(*shape, dtype=torch.float16, seed=0):
    """Small integers: every sum of their products is exact under every arithmetic, so that only indexing matters."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def same(a, b):
    return torch.equal(a, b) and torch.equal(torch.signbit(a), torch.signbit(b))


@pytest.mark.parametrize("dtype", HALVES)
def test_arrays_keep_their_format_on_the_way_there_and_back(dtype):
    x = torch.arange(0, 2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    back = from_numpy(to_numpy(x))
    assert torch.equal(back.view(torch.int16), x.view(torch.int16))
    assert to_numpy(x.t()).dtype == FORMATS[dtype].dtype


@pytest.mark.parametrize("choice", CHOICES)
def test_empty_expanded_and_special_operands_are_products_too(choice):
    with emulate("cuda", **choice):
        for rows, inner, columns in ((0, 3, 2), (2, 0, 3), (2, 3, 0)):
            empty = torch.ones(rows, inner).half() @ torch.ones(inner, columns).half()
            assert empty.shape == (rows, columns)
            assert not empty.any()
        assert torch.bmm(torch.ones(0, 2, 2).half(), torch.ones(0, 2, 2).half()).shape == (0, 2, 2)
        spread = torch.ones(4, 1).half().expand(4, 4)
        assert (spread @ spread.t()).unique().tolist() == [4.0]
        large = torch.full((1, 2), 3e38).bfloat16()
        assert (large @ torch.ones(2, 1).bfloat16()).item() == float("inf")
        assert (large * float("nan") @ torch.ones(2, 1).bfloat16()).isnan().all()
        with torch.inference_mode():
            assert nn.Linear(3, 3).half()(torch.ones(2, 3).half()).dtype == torch.float16


@pytest.mark.parametrize("dtype", HALVES)
def test_fast_is_the_fp32_product_rounded_once(dtype):
    a, b, c = (torch.randn(40, 40).to(dtype) for _ in range(3))
    with emulate("cuda"):
        results = (
            a @ b,
            torch.addmm(c, a, b),
            torch.bmm(a[None], b[None])[0],
            torch.baddbmm(c[None], a[None], b[None])[0],
        )
    wide = (a.float() @ b.float()).to(dtype)
    added = torch.addmm(c.float(), a.float(), b.float()).to(dtype)
    for found, expected in zip(results, (wide, added, wide, added), strict=True):
        assert same(found, expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("arch", ["ampere", "hopper", "blackwell", "cdna3"])
def test_tensor_core_products_are_those_of_the_reference_bit_for_bit(arch, dtype):
    a, b, c = (torch.randn(3, 24, 24).to(dtype) for _ in range(3))
    unit = mp.tensor_core(arch)
    expected = mp.matmul(to_numpy(a), to_numpy(b), accumulator=unit, out_format=mp.FP32)
    with emulate("cuda", arch, arithmetic="tensor-core"):
        product, added = torch.bmm(a, b), torch.baddbmm(c, a, b, beta=0.5, alpha=2.0)
    assert same(product, torch.from_numpy(expected).to(dtype))
    assert same(added, (c.float() * 0.5 + torch.from_numpy(expected) * 2.0).to(dtype))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"arithmetic": "fast"}, 4096.0),
        ({"arithmetic": "exact"}, 4096.0),
        ({"arithmetic": "tensor-core", "arch": "hopper"}, 4096.0),
        ({"arithmetic": "fp16-accumulate"}, 0.0),
    ],
)
def test_a_long_sum_shows_whether_the_accumulator_has_16_bits(choice, expected):
    row = torch.ones(1, 4096, dtype=torch.bfloat16)
    row[0, 0], row[0, -1] = 256.0, -256.0
    with emulate("cuda", **choice):
        assert (row @ torch.ones(4096, 1, dtype=torch.bfloat16)).item() == expected  # 4094 lies between two values


def test_an_fp16_accumulator_of_an_architecture_is_its_own_unit():
    a, b = torch.randn(8, 32).half(), torch.randn(32, 8).half()
    with emulate("cuda", "ampere", arithmetic="fp16-accumulate"):
        found = a @ b
    unit = mp.tensor_core("ampere", result=mp.FP16)
    assert same(found, from_numpy(mp.matmul(to_numpy(a), to_numpy(b), accumulator=unit)))


@pytest.mark.parametrize("dtype", HALVES)
def test_exact_products_do_not_depend_on_the_order_of_the_sum(dtype):
    torch.manual_seed(0)
    a = torch.randn(6, 50).to(dtype) * torch.exp2(torch.randint(-6, 7, (50,)).float()).to(dtype)
    b, c = torch.randn(50, 6).to(dtype), torch.randn(6).to(dtype)
    order = torch.randperm(50)
    with emulate("cuda", arithmetic="exact"):
        assert same(torch.addmm(c, a, b), torch.addmm(c, a[:, order], b[order]))


@pytest.mark.parametrize("dtype", HALVES)
def test_exact_takes_the_addend_and_factors_that_are_powers_of_two_into_its_one_rounding(dtype):
    torch.manual_seed(1)
    a, b, c = (torch.randn(9, 9).to(dtype) for _ in range(3))
    with emulate("cuda", arithmetic="exact"):
        found = torch.addmm(c, a, b, beta=2.0, alpha=0.25)
    exact = 2.0 * c.double() + 0.25 * (a.double() @ b.double())
    assert same(found, from_numpy(mp.cast(exact.numpy(), FORMATS[dtype])))


def test_exact_with_another_factor_rounds_the_sum_to_fp32_before_it():
    a, b = torch.randn(4, 4).half(), torch.randn(4, 4).half()
    product = torch.from_numpy(mp.matmul(to_numpy(a), to_numpy(b), accumulator="exact", out_format=mp.FP32))
    found = EmulatedArithmetic({torch.float16: "exact"}).product(a, b, b, alpha=0.3)
    assert same(found, (product * 0.3 + b.float()).half())
    assert same(FastArithmetic().product(a, b, alpha=0.3), ((a.float() @ b.float()) * 0.3).half())


@pytest.mark.parametrize("choice", CHOICES)
def test_every_op_of_the_family_multiplies_the_right_elements(choice):
    a, b, c = integers(5, 7), integers(7, 3, seed=1), integers(5, 3, seed=2)
    u, v, w = integers(7, seed=3), integers(5, seed=4), integers(7, seed=5)
    batch_a, batch_b, batch_c = integers(2, 5, 7), integers(2, 7, 3, seed=1), integers(2, 5, 3, seed=2)

    def results(convert):
        x = [convert(part) for part in (a, b, c, u, v, w, batch_a, batch_b, batch_c)]
        out = x[2].new_empty(5, 3)
        return [
            x[0] @ x[1], torch.mm(x[0], x[1], out=out), torch.addmm(x[2], x[0], x[1], beta=0),
            torch.addmm(x[2], x[0], x[1], out=out.clone()), x[2].clone().addmm_(x[0], x[1], alpha=2),
            x[0] @ x[3], torch.addmv(x[4], x[0], x[3]), x[4].clone().addmv_(x[0], x[3]),
            torch.addmv(x[4], x[0], x[3], beta=0), torch.dot(x[3], x[5]), torch.vdot(x[3], x[5]), x[6] @ x[7],
            torch.baddbmm(x[8], x[6], x[7], beta=2), x[8].clone().baddbmm_(x[6], x[7]),
            torch.addbmm(x[2], x[6], x[7]), torch.einsum("bij,bjk->ik", x[6], x[7]),
        ]  # fmt: skip

    with emulate("cuda", **choice):
        found = results(lambda x: x)
    for number, (have, want) in enumerate(zip(found, results(torch.Tensor.double), strict=True)):
        assert have.dtype == torch.float16
        assert torch.equal(have.double(), want), number


GEOMETRIES = [
    {},
    {"stride": 2, "padding": 1},
    {"padding": 2, "dilation": 2},
    {"groups": 2, "padding": 1},
    {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2), "groups": 2},
]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("dimensions", "transposed"), list(itertools.product((1, 2, 3), (False, True))))
def test_convolutions_and_their_gradients_add_the_right_products(choice, dimensions, transposed):
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{dimensions}d")
    for geometry in GEOMETRIES if dimensions == 2 else GEOMETRIES[:2]:
        options = dict(geometry, output_padding=1) if transposed and geometry.get("stride") == 2 else geometry
        layer = kind(4, 6, 3, **options)
        for number, parameter in enumerate(layer.parameters()):
            parameter.data = integers(*parameter.shape, dtype=torch.float32, seed=number)
        x = integers(2, 4, *range(7, 7 + dimensions), dtype=torch.float32, seed=7)

        def gradients(layer=layer, x=x, convert=torch.Tensor.half):
            values = [convert(part.detach()).requires_grad_() for part in (x, *layer.parameters())]
            out = torch.func.functional_call(
                layer, dict(zip(("weight", "bias"), values[1:], strict=True)), (values[0],)
            )
            pull = convert(integers(*out.shape, seed=8))
            return out, *torch.autograd.grad(out, values, pull)

        with emulate("cuda", **choice):
            found = gradients()
        for have, want in zip(found, gradients(convert=torch.Tensor.double), strict=True):
            assert have.dtype == torch.float16
            assert have.shape == want.shape
            assert torch.equal(have.double(), want), geometry


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", ["plain", "causal", "boolean mask", "additive mask", "scaled"])
def test_attention_and_its_gradients_stay_within_the_rounding_of_their_16_bit_steps(choice, kind):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    mask = torch.rand(6, 6) > 0.3
    mask[:, 0] = True
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "boolean mask": {"attn_mask": mask},
        "additive mask": {"attn_mask": torch.randn(6, 6)},
        "scaled": {"scale": 0.25},
    }[kind]

    def run(dtype):
        values = [x.half().to(dtype).requires_grad_() for x in (q, k, v)]
        given = {key: x.to(dtype) if key == "attn_mask" and x.dtype != torch.bool else x for key, x in options.items()}
        out = nn.functional.scaled_dot_product_attention(*values, **given)
        return out, *torch.autograd.grad(out, values, torch.ones_like(out))

    with emulate("cuda", **choice):
        found = run(torch.float16)
    for have, want in zip(found, run(torch.float64), strict=True):
        assert have.dtype == torch.float16
        # each of the three products rounds sums of 8 terms of size at most 4, in the widest case at each term
        bound = 24 * 4 * 2.0**-11 if choice["arithmetic"] == "fp16-accumulate" else 8 * 4 * 2.0**-11
        assert (have.double() - want).abs().max().item() <= bound


def test_attention_masks_reach_the_kernel_of_every_arithmetic():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 4, 8).half() for _ in range(3))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for mask in (torch.zeros(4, 4).half(), torch.ones(4, 4, dtype=torch.bool)):
        with emulate("cuda", arithmetic="exact"):
            out, logsumexp = flash(q, k, v, 0.0, False, attn_mask=mask)
            same_out, same_logsumexp = flash(q, k, v)
        assert torch.equal(out, same_out)
        assert torch.equal(logsumexp, same_logsumexp)


def test_the_fast_attention_is_the_fp32_one_rounded_once():
    q, k, v = (torch.randn(1, 2, 5, 8).half() for _ in range(3))
    with emulate("cuda"):
        found = nn.functional.scaled_dot_product_attention(q, k, v)
    assert same(found, nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float()).half())


def test_backward_products_use_the_arithmetic_as_well():
    x, weight = torch.ones(1, 1), torch.ones(1, 4096, requires_grad=True)
    grad = torch.ones(1, 4096)
    grad[0, 0], grad[0, -1] = 256.0, -256.0
    seen = []
    for arithmetic in ("fast", "fp16-accumulate"):
        inputs = x.clone().requires_grad_()
        with emulate("cuda", arithmetic=arithmetic, precision="bf16-mixed"):
            (inputs @ weight).backward(grad.bfloat16())
        seen.append(inputs.grad.item())
    assert seen == [4096.0, 0.0]


def test_a_frozen_convolution_gives_only_the_gradients_that_are_wanted():
    x = integers(1, 2, 5, 5, seed=1)
    layer = nn.Conv2d(2, 3, 3).half()
    wanted = {"input": [True, False, False], "weight": [False, True, False], "bias": [False, False, True]}
    with emulate("cuda", arithmetic="exact"):
        grad = integers(1, 3, 3, 3, seed=2)
        for place, mask in enumerate(wanted.values()):
            found = torch.ops.aten.convolution_backward(
                grad, x, layer.weight, [3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask
            )
            assert [part is not None for part in found] == mask
            assert found[place].dtype == torch.float16


def test_tf32_cuts_fp32_operands_and_leaves_16_bit_operands_alone():
    a = torch.tensor([[1.0 + 2.0**-11, float("nan")]]).t()
    b = torch.tensor([[1.0]])
    with emulate("cuda", precision="tf32"):
        assert (a @ b)[0].item() == 1.0
        assert (a @ b)[1].isnan()
    with emulate("cuda", "ampere", precision="tf32", arithmetic="tensor-core"):
        assert (a @ b)[0].item() == 1.0
    with emulate("cuda", precision="fp32"):
        assert (a @ b)[0].item() == 1.0 + 2.0**-11


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_products_of_other_dtypes_stay_torchs_own(arithmetic):
    a, b = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3)
    wide, single = a @ a, b @ b
    with emulate("cuda", "ampere", arithmetic=arithmetic):
        assert same(a @ a, wide)
        assert same(b @ b, single)


def test_numpy_kernels_take_widened_arrays_and_their_results_are_rounded_once():
    seen = []

    def tanh(x):
        seen.append(x.dtype)
        return np.tanh(x.astype(np.float64)).astype(np.float32)

    def nll(log_probabilities, target, weight, reduction, ignore_index):
        assert target.dtype == np.int64
        return np.float32(7.0), None

    with emulate("cuda", arithmetic="exact", kernels={"tanh": tanh, "nll_loss_forward": nll}):
        half = torch.tanh(torch.tensor([0.5], dtype=torch.bfloat16))
        loss = nn.functional.nll_loss(torch.zeros(1, 2), torch.tensor([0]))
    assert seen == [np.float32]
    assert to_numpy(half)[0] == np.tanh(0.5).astype(ml_dtypes.bfloat16)
    assert loss.item() == 7.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"arithmetic": "tensor-core"},
            "arithmetic='tensor-core' needs arch, one of volta, turing, ampere, ada, hopper",
        ),
        ({"arch": "pascal"}, "arch='pascal' cannot be emulated: tensor core 'pascal' is none of volta, turing, ampere"),
        (
            {"arch": "volta", "arithmetic": "tensor-core", "precision": "bf16-mixed"},
            "arch='volta' cannot be emulated: .* does not multiply bf16 by bf16; it multiplies fp16",
        ),
        (
            {"arch": "pascal", "arithmetic": "tensor-core"},
            "arch='pascal' cannot be emulated: tensor core 'pascal' is none",
        ),
        ({"arch": "cdna1", "arithmetic": "fp16-accumulate"}, "arch='cdna1' cannot be emulated: .*choose result=FP32"),
    ],
)
def test_an_architecture_that_cannot_serve_is_refused_with_the_known_ones(options, message):
    with pytest.raises(AmpConfigError, match=message):
        emulate("cuda", **options)


def test_a_unit_without_a_format_says_so_when_it_meets_one():
    half = torch.ones(2, 2, dtype=torch.bfloat16)
    with (
        emulate("cuda", "volta", arithmetic="tensor-core"),
        pytest.raises(ValueError, match=r"tensor_core\(volta\) does not multiply bf16 by bf16; it multiplies fp16"),
    ):
        half @ half
