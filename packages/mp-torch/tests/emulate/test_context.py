import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mp_torch
from mp_reference.spec.op_rules import OpRule, op_rules
from mp_torch import AmpEngine
from mp_torch.emulate import Emulation, EmulationWarning, emulate
from mp_torch.emulate.rules import install_rules
from mp_torch.errors import AmpConfigError, AmpStateError, UnsupportedDeviceError


def dispatcher_tables():
    return {op: torch._C._dispatch_dump_table(op) for op in torch._C._dispatch_get_all_op_names()}


def process_state():
    return (
        dispatcher_tables(),
        torch.clear_autocast_cache,
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch._C._len_torch_dispatch_stack(),
    )


DEVICES = ["cuda", "cpu", "xpu", "mps", "mtia", "maia", "npu"]


@pytest.mark.parametrize("device", DEVICES)
def test_afterwards_the_process_is_exactly_as_before_also_after_an_error(device):
    before = process_state()
    options = {"precision": "bf16-mixed", "overflow": "saturate", "subnormals": False}
    with emulate(device, **options):
        assert device == "cpu" or process_state()[0] != before[0]
    assert process_state() == before
    with pytest.raises(ZeroDivisionError), emulate(device, **options):
        _ = 1 / 0
    assert process_state() == before


def test_the_package_is_the_promised_function():
    assert mp_torch.emulate.emulate is emulate
    with mp_torch.emulate("cuda") as emulation:
        assert emulation == Emulation(device="cuda")


def test_softmax_layer_norm_pow_sum_and_norm_are_fp32_as_on_cuda_and_16_bit_as_the_cpu_has_it():
    def dtypes():
        half = torch.ones(4, 4, dtype=torch.float16)
        with torch.autocast("cpu", dtype=torch.float16):
            results = torch.softmax(half, 0), nn.functional.layer_norm(half, (4,)), half**2, half.sum(), half.norm()
        return {x.dtype for x in results}

    with emulate("cuda"):
        assert dtypes() == {torch.float32}
    assert dtypes() == {torch.float16}


def test_nested_autocast_regions_decide_innermost_first():
    x = torch.ones(2, 2)
    with emulate("cuda", precision="fp16-mixed"):
        assert (x @ x).dtype == torch.float16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (x @ x).dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.float16
    assert (x @ x).dtype == torch.float32


def test_recomputation_in_a_checkpoint_follows_the_same_rules_and_gives_the_same_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 2))
    x = torch.randn(3, 8)

    def gradients(run):
        model.zero_grad()
        with emulate("cuda", precision="fp16-mixed"):
            run(model, x).float().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients(lambda block, inputs: block(inputs))
    recomputed = gradients(lambda block, inputs: checkpoint(block, inputs, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_every_thread_meets_the_rules_and_each_enters_its_own_autocast():
    seen = []

    def work():
        half = torch.ones(2, dtype=torch.float16)
        seen.append(half.exp().dtype)
        with torch.autocast("cpu", dtype=torch.float16):
            seen.append(half.exp().dtype)

    with emulate("cuda", precision="fp16-mixed"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [torch.float16, torch.float32]


def test_one_emulation_entered_by_two_threads_ends_with_the_last_of_them():
    emulation, half = emulate("cuda", precision="fp16-mixed"), torch.ones(2, dtype=torch.float16)
    entered, leave, seen = threading.Event(), threading.Event(), []

    def work():
        with emulation:
            entered.set()
            leave.wait(10)
            seen.append(half.exp().dtype)
        seen.append(torch.is_autocast_enabled("cpu"))

    with emulation:
        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(10)
    assert not torch.is_autocast_enabled("cpu")
    leave.set()
    thread.join()
    assert seen == [torch.float32, False]
    with torch.autocast("cpu", dtype=torch.float16):
        assert half.exp().dtype == torch.float16


def test_the_same_emulation_nests_and_ends_with_the_outermost():
    half = torch.ones(2, dtype=torch.float16)
    with emulate("cuda", precision="fp16-mixed"):
        with emulate("cuda", precision="fp16-mixed"):
            assert half.exp().dtype == torch.float32
        assert half.exp().dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert half.exp().dtype == torch.float16


def test_nesting_two_different_emulations_is_refused_and_leaves_the_first_in_force():
    half = torch.ones(2, dtype=torch.float16)
    with emulate("cuda", precision="fp16-mixed"):
        message = (
            r"Emulation\(device='npu'.*cannot be entered while Emulation\(device='cuda'.*one dispatcher; leave the"
        )
        with pytest.raises(AmpStateError, match=message), emulate("npu"):
            pass
        assert half.exp().dtype == torch.float32


def test_the_cast_of_a_changed_weight_is_not_used_again():
    weight = nn.Parameter(torch.ones(2, 2))
    with emulate("npu", precision="bf16-mixed"):
        first = torch.mv(weight, torch.ones(2))
        again = torch.mv(weight, torch.ones(2))
        with torch.no_grad():
            weight.fill_(2.0)
        changed = torch.mv(weight, torch.ones(2))
    assert first.tolist() == again.tolist() == [2.0, 2.0]
    assert changed.tolist() == [4.0, 4.0]


def test_a_weight_cast_twice_in_a_region_is_cast_once_so_its_gradients_add_up_in_16_bits():
    weight = nn.Parameter(torch.ones(1, 1))
    with emulate("cuda", precision="bf16-mixed"):
        total = torch.mv(weight, torch.tensor([256.0])).float() + torch.mv(weight, torch.tensor([1.0])).float()
    total.sum().backward()
    assert weight.grad.item() == 256.0  # 257 needs nine bits
    weight.grad = None
    with emulate("cuda"), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        total = torch.mv(weight, torch.tensor([256.0])).float() + torch.mv(weight, torch.tensor([1.0])).float()
    total.sum().backward()
    assert weight.grad.item() == 257.0


def test_a_forward_without_gradients_does_not_cost_the_next_forward_its_gradients():
    layer = nn.Linear(2, 2)
    with emulate("cuda", precision="fp16-mixed"):
        with torch.no_grad():
            layer(torch.ones(1, 2))
            torch.mv(layer.weight, torch.ones(2))
        assert layer(torch.ones(1, 2)).requires_grad
        assert torch.mv(layer.weight, torch.ones(2)).requires_grad


def test_promotion_takes_the_widest_and_refuses_the_other_16_bit_format():
    half, brain, single = (torch.ones(3, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    with emulate("cuda", precision="fp16-mixed"):
        assert torch.dot(half, half).dtype == torch.float16
        assert torch.dot(half, single).dtype == torch.float32
        message = (
            "Unexpected floating ScalarType: aten::dot promotes .* torch.bfloat16 beside torch.float16 has no widest"
        )
        with pytest.raises(RuntimeError, match=message):
            torch.dot(brain, half)


def test_a_dtype_that_the_caller_asks_for_is_kept_and_float64_is_left_alone():
    half = torch.ones(3, dtype=torch.float16)
    with emulate("cuda", precision="fp16-mixed"):
        assert torch.softmax(half, 0, dtype=torch.float64).dtype == torch.float64
        assert torch.ops.aten.softmax.int(half, 0, torch.float16).dtype == torch.float16
        assert torch.ops.aten.softmax.int(half, 0, None).dtype == torch.float32
        assert torch.cumsum(half, 0, dtype=torch.float16).dtype == torch.float16
        assert torch.ops.aten.norm.Scalar(half, 2).dtype == torch.float32
        assert torch.ops.aten.norm.ScalarOpt_dim(half, 2, [0]).dtype == torch.float32
        assert torch.ops.aten.norm.Scalar(half.double(), 2).dtype == torch.float64
        assert torch.addmv(half, torch.eye(3), half, beta=0.5).tolist() == [1.5, 1.5, 1.5]
        for op in (torch.exp, torch.sum, torch.norm):
            assert op(half.double()).dtype == torch.float64
        assert torch.mv(torch.eye(3, dtype=torch.float64), half.double()).dtype == torch.float64


def test_two_installations_of_rules_may_end_in_any_order():
    clear = torch.clear_autocast_cache
    first = install_rules({"aten::exp": "fp32"})
    second = install_rules({"aten::log": "fp32"})
    first()
    assert torch.clear_autocast_cache is not clear
    torch.clear_autocast_cache()
    second()
    first()
    assert torch.clear_autocast_cache is clear


def test_an_op_that_other_devices_lower_and_this_one_does_not_warns_once():
    x = torch.ones(3)
    with emulate("npu", precision="fp16-mixed"):
        message = "aten::linalg_vecdot has no op rule on npu and runs in fp32 there; cast its inputs yourself if you"
        with pytest.warns(EmulationWarning, match=message):
            assert torch.linalg.vecdot(x, x).dtype == torch.float32
        torch.linalg.vecdot(x, x)  # a second warning would be an error here


@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-mixed"])
def test_the_engine_works_unchanged_and_its_16_bit_steps_are_those_of_the_emulated_device(precision):
    def losses(use_emulation):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        engine = AmpEngine(model, torch.optim.AdamW(model.parameters(), 1e-2), precision=precision)
        x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
        found, dtypes = [], set()
        for _ in range(5):
            with emulate("cuda") if use_emulation else nullcontext():
                with engine.autocast():
                    dtypes.add(model[0](x).pow(2).dtype)
                    loss = nn.functional.cross_entropy(model(x), y)
                engine.backward(loss)
                assert engine.step().applied
            found.append(loss.item())
        return found, dtypes

    emulated, emulated_dtypes = losses(True)
    _, own_dtypes = losses(False)
    assert emulated[-1] < emulated[0]
    assert emulated_dtypes == {torch.float32}
    assert own_dtypes == {torch.float16 if precision == "fp16-mixed" else torch.bfloat16}


def test_the_inference_fast_path_of_attention_layers_is_off_as_autocast_has_it_elsewhere():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad(), emulate("cuda", precision="fp16-mixed"):
        assert layer.self_attn(*[torch.ones(1, 3, 8)] * 3)[0].dtype == torch.float16


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"device": "tpu"},
            UnsupportedDeviceError,
            "emulate: device='tpu' is not one of cuda, cpu, xpu, mps, mtia, maia",
        ),
        (
            {"precision": "fp8"},
            AmpConfigError,
            "emulate: precision='fp8' is not one of fp32, tf32, fp16-mixed, bf16-mixed",
        ),
        ({"arithmetic": "slow"}, AmpConfigError, "emulate: arithmetic='slow' is not one of fast"),
        ({"overflow": "wrap"}, AmpConfigError, "emulate: overflow='wrap' is not one of ieee, saturate; choose one of"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_known_ones(options, error, message):
    with pytest.raises(error, match=message):
        emulate(**options)


def test_a_model_that_is_not_on_the_cpu_is_refused():
    message = r"emulate: weight is on meta, and only CPU tensors can be emulated; move the model with model.cpu\(\), or"
    with pytest.raises(UnsupportedDeviceError, match=message):
        emulate("cuda", model=nn.Linear(2, 2, device="meta"))
    emulate("cuda", model=nn.Linear(2, 2))


def test_rows_and_registrations_of_another_torch_release_do_no_harm(monkeypatch):
    listed = op_rules("cuda")
    newer = {**listed, "aten::not_in_this_release": OpRule(
        op="aten::not_in_this_release", device="cuda", rule="fp32", since="9.9", until=None, source="a test"
    )}  # fmt: skip
    monkeypatch.setattr(
        "mp_torch.emulate.context.op_rules", lambda device: newer if device == "cuda" else op_rules(device)
    )
    monkeypatch.setattr("mp_torch.emulate.context.registered", lambda _: {"aten::mm", "aten::relu", "aten::cat"})
    rules = Emulation(device="cuda")._rules()
    assert rules["absent"] == {"aten::relu", "aten::cat"}
    assert "aten::mm" not in rules["rules"]
    assert rules["rules"]["aten::linear"] == "lower_precision_fp"  # the CPU's own kernel is not there to be used
    assert "aten::not_in_this_release" not in rules["rules"]


def test_the_engine_refuses_fp16_on_hardware_that_saturates_without_telling():
    model = nn.Linear(2, 2)
    with (
        emulate("npu", overflow="saturate"),
        pytest.raises(UnsupportedDeviceError, match="65504 there and no status flag tells of it"),
    ):
        AmpEngine(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp16-mixed")


@pytest.mark.parametrize(
    ("saturate", "flush", "expected"),
    [
        (True, False, [65504.0, -65504.0, 0.0, 2.0**-20]),
        (False, True, [float("inf"), float("-inf"), float("nan"), 0.0]),
    ],
)
def test_limits_act_on_their_own_on_every_16_bit_result(saturate, flush, expected):
    values = torch.tensor([1e6, -1e6, float("nan"), 2.0**-20])
    with emulate("npu", overflow="saturate" if saturate else "ieee", subnormals=not flush):
        found = values.half()
        views = found.view(2, 2)[0, 0].item(), found.float().dtype
    assert [repr(x) for x in found.tolist()] == [repr(x) for x in expected]
    assert views == (expected[0], torch.float32)
