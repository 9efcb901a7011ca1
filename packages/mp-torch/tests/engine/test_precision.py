"""What runs in which precision: by op, by module, eager, compiled, recomputed, and in other threads."""

import copy
import pickle
import re
import shutil
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mp_torch import AmpConfigError, AmpEngine, AmpStateError, LossScale, emulate
from mp_torch.devices import device_named
from mp_torch.devices.cuda import CUDADevice
from mp_torch.precision import OpRules, functions_named

LOW = torch.bfloat16


class Net(nn.Module):
    """Linear, norm, linear, softmax; remembers the dtypes that it saw."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 4)
        self.seen = {}

    def forward(self, x):
        for name in ("first", "norm", "second"):
            x = getattr(self, name)(x)
            self.seen[name] = x.dtype
        x = functional.softmax(x, -1)
        self.seen["softmax"] = x.dtype
        return x


def engine_of(precision="bf16-mixed", model=None, **settings):
    torch.manual_seed(0)
    model = Net() if model is None else model
    return model, AmpEngine(model, torch.optim.AdamW(model.parameters(), lr=0.01), precision, **settings)


def seen(engine, model):
    with engine.autocast():
        model(torch.ones(2, 8))
    return dict(model.seen)


def test_norms_and_softmax_compute_in_fp32_without_being_named():
    model, engine = engine_of()
    assert seen(engine, model) == {
        "first": LOW, "norm": torch.float32, "second": LOW, "softmax": torch.float32
    }  # fmt: skip


def test_without_the_safe_rules_the_devices_own_table_decides():
    model, engine = engine_of(safe_ops=False)
    assert seen(engine, model)["softmax"] == LOW


@pytest.mark.parametrize("pattern", ["first", "*irst", nn.Linear, re.compile("^fir")])
def test_modules_named_by_glob_class_or_regex_compute_in_fp32(pattern):
    model, engine = engine_of(keep_fp32=[pattern])
    assert seen(engine, model)["first"] == torch.float32
    kept = [name for name in engine.explain().modules if name.rule.startswith("keep_fp32")]
    assert "first" in [one.name for one in kept]


@pytest.mark.parametrize("precision", ["bf16-true", "fp16-true"])
def test_a_kept_module_keeps_fp32_parameters_in_a_true_precision(precision):
    model, engine = engine_of(precision, keep_fp32=["norm"])
    assert model.norm.weight.dtype == torch.float32
    assert model.first.weight.dtype == engine.assembly.row.parameter
    assert seen(engine, model)["norm"] == torch.float32


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"])
@pytest.mark.parametrize("settings", [{}, {"safe_ops": False}, {"lower": ["1"]}])
def test_batch_norm_keeps_fp32_parameters_and_statistics_and_passes_16_bits_on(precision, settings):
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))
    _, engine = engine_of(precision, model, loss_scale=LossScale.off(), **settings)
    seen = []
    model[1].register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    with engine.autocast():
        loss = model(torch.randn(4, 2, 2, 2)).float().square().mean()
    engine.backward(loss)
    assert engine.step().applied
    assert seen == [engine.assembly.row.compute]
    assert {one.dtype for one in [*model[1].parameters(), model[1].running_mean]} == {torch.float32}
    assert model[1].running_mean.abs().sum() > 0


def test_a_lowered_module_computes_low_although_a_default_rule_would_keep_it():
    model, engine = engine_of(lower=["norm"])
    assert seen(engine, model) == {"first": LOW, "norm": LOW, "second": LOW, "softmax": torch.float32}
    assert engine.explain()["norm"].rule == "lower: norm"


def test_a_lowered_container_lowers_everything_inside_it():
    model, engine = engine_of(lower=["*"])
    assert set(seen(engine, model).values()) == {LOW}


@pytest.mark.parametrize("call", [torch.exp, torch.Tensor.exp, lambda x: x.exp()])
def test_an_op_rule_holds_however_the_function_is_called(call):
    _, engine = engine_of(op_rules={"exp": "fp32"})
    with engine.autocast():
        assert call(torch.full((1,), 12.0, dtype=torch.float16)).item() == pytest.approx(162754.79, rel=1e-6)


def test_op_rules_lower_and_promote():
    _, engine = engine_of(op_rules={"tanh": "lower_precision_fp", "add": "promote"})
    with engine.autocast():
        assert torch.tanh(torch.ones(2)).dtype == LOW
        assert torch.add(torch.ones(2), torch.ones(2).double()).dtype == torch.float64
        assert torch.add(torch.ones(2, dtype=LOW), torch.ones(2, dtype=LOW)).dtype == LOW


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_a_tensor_of_the_other_16_bit_dtype_joins_in_the_dtype_that_holds_both(join):
    _, engine = engine_of()
    low, other = torch.ones(1, dtype=LOW), torch.ones(1, dtype=torch.float16)
    with engine.autocast():
        assert join([other, low]).dtype == torch.float32
        assert join([low, low]).dtype == LOW
        assert join([low, torch.ones(1)]).dtype == torch.float32
        assert join([torch.ones(1, dtype=torch.int64)] * 2).dtype == torch.int64


def test_an_unknown_op_is_answered_with_the_nearest_name():
    with pytest.raises(AmpConfigError, match=r"have no function 'sofmax', did you mean 'softmax'\?"):
        engine_of(op_rules={"sofmax": "fp32"})


@pytest.mark.parametrize("setting", ["keep_fp32", "lower"])
def test_a_pattern_that_names_no_module_is_refused_with_the_names_there_are(setting):
    with pytest.raises(
        AmpConfigError, match=r"pattern 'frist' names no module of Net; its modules are first, norm, sec"
    ):
        engine_of(**{setting: ["frist"]})


def test_the_loss_needs_no_cast_by_hand():
    model, engine = engine_of()
    with engine.autocast():
        loss = functional.cross_entropy(model.second(torch.ones(2, 8)), torch.tensor([0, 1]))
    assert loss.dtype == torch.float32


class Positional(nn.Module):
    """Rotary angles of far positions: in bf16 every position past 256 shares an angle with a neighbour."""

    def forward(self, positions):
        return torch.outer(positions, torch.ones(1))


class RotaryEmbedding(Positional):
    """The same under a name that says what it is."""


def test_positions_stay_exact_in_a_module_that_says_what_it_is():
    model = nn.ModuleDict({"rotary": RotaryEmbedding(), "other": Positional(), "linear": nn.Linear(1, 1)})
    _, engine = engine_of(model=model)
    positions = torch.arange(4096.0)
    with engine.autocast():
        assert len(model["rotary"](positions).unique()) == 4096
        assert len(torch.mm(positions[:, None], torch.ones(1, 1)).unique()) < 4096


# ---- the same rules everywhere ----

SETTINGS = [{}, {"keep_fp32": ["first"]}, {"lower": ["norm"]}, {"op_rules": {"linear": "fp32"}}, {"safe_ops": False}]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: ",".join(one) or "default")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_compiled_modules_follow_the_same_rules_in_one_graph(settings, precision):
    torch._dynamo.reset()
    model, engine = engine_of(precision, **settings)
    model.forward = plain_forward.__get__(model)
    x = torch.randn(4, 8)
    with engine.autocast():
        eager = model(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert compiled.dtype == eager.dtype
    assert torch.equal(compiled, eager)


def plain_forward(self, x):
    return functional.softmax(self.second(self.norm(self.first(x))), -1)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo asks the loss for one
def test_loss_and_backward_compile_and_the_step_follows():
    torch._dynamo.reset()
    runs = []
    for compiled in (False, True):
        model, engine = engine_of()
        model.forward = plain_forward.__get__(model)

        def micro_step(x, y, model=model, engine=engine):
            with engine.autocast():
                loss = functional.mse_loss(model(x), y)
            engine.backward(loss)
            return loss

        run = torch.compile(micro_step, backend="aot_eager") if compiled else micro_step
        losses = []
        for _ in range(3):
            losses.append(run(torch.ones(4, 8), torch.zeros(4, 4)).item())
            assert engine.step().applied
        runs.append((losses, model.first.weight.detach().clone()))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    ("precision", "settings"),
    [("fp16-mixed", {"accumulate_steps": 2}), ("bf16-true", {}), ("bf16-sr", {}), ("fp32", {"update": "exact"})],
)
def test_a_whole_iteration_compiles_to_the_same_bits(precision, settings):
    """Forward, backward, step and report in one compiled function; the step itself runs as it is."""
    runs = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, engine = engine_of(precision, max_grad_norm=1.0, **settings)
        model.forward = plain_forward.__get__(model)

        def iteration(x, y, model=model, engine=engine):
            with engine.autocast():
                loss = functional.mse_loss(model(x).float(), y)
            engine.backward(loss)
            report = engine.step()
            return loss.detach(), report.applied, report.grad_norm

        run = torch.compile(iteration, backend="aot_eager") if compiled else iteration
        told = [run(torch.ones(4, 8), torch.zeros(4, 4)) for _ in range(4)]
        runs.append(
            ([(loss.item(), *rest) for loss, *rest in told], {k: v.clone() for k, v in engine.masters().items()})
        )
    assert runs[0][0] == runs[1][0]
    assert runs[0][0][-1][1]
    assert all(torch.equal(runs[1][1][name], value) for name, value in runs[0][1].items())


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler, and there is no g++")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_the_step_after_an_inductor_backward_is_the_same_step():
    """Inductor may round less often than eager mode; what the engine makes of its gradients is the same to the bit."""
    torch._dynamo.reset()
    model, engine = engine_of(max_grad_norm=1.0)
    model.forward = plain_forward.__get__(model)
    twin = copy.deepcopy(model)
    eager = AmpEngine(twin, torch.optim.AdamW(twin.parameters(), lr=0.01), "bf16-mixed", max_grad_norm=1.0)
    compiled = torch.compile(model, backend="inductor")
    for _ in range(2):
        with engine.autocast():
            loss = functional.mse_loss(compiled(torch.ones(4, 8)), torch.zeros(4, 4))
        engine.backward(loss)
        eager.backward(sum((one * 0).sum() for one in twin.parameters()))
        for name, gradient in engine.gradients().items():
            twin.get_parameter(name).grad = gradient.clone()
        assert engine.step().grad_norm == eager.step().grad_norm > 0
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: ",".join(one) or "default")
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_in_backward_follows_the_rules_of_forward(settings, reentrant):
    gradients = []
    for recompute in (False, True):
        model, engine = engine_of(**settings)
        x = torch.randn(4, 8, requires_grad=True, generator=torch.Generator().manual_seed(1))
        with engine.autocast():
            out = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
            loss = out.float().square().sum()
        forward = dict(model.seen)
        engine.backward(loss)
        assert model.seen == forward
        gradients.append([one.grad.clone() for one in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_thread_that_enters_the_context_gets_the_same_rules_and_another_gets_none():
    model, engine = engine_of()
    results = {}

    def work(name, inside):
        if inside:
            results[name] = seen(engine, model)
        else:
            results[name] = model(torch.ones(1, 8)).dtype

    with engine.autocast():
        for name, inside in (("in", True), ("out", False)):
            thread = threading.Thread(target=work, args=(name, inside))
            thread.start()
            thread.join()
    assert results["in"]["first"] == LOW
    assert results["out"] == torch.float32


def test_modules_with_regions_survive_copying_and_pickling_with_their_rules():
    model, engine = engine_of(keep_fp32=["first"], lower=["norm"])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # our own bytes
        assert seen(engine, other)["first"] == torch.float32
        assert other.seen["norm"] == LOW
        other.first.weight.data.zero_()
        assert model.first.weight.abs().sum() > 0


def test_an_inner_autocast_of_another_dtype_holds_within_itself_and_is_warned_of_once():
    model, engine = engine_of()
    with engine.autocast(), torch.autocast("cpu", torch.float16):
        assert model.first(torch.ones(1, 8)).dtype == torch.float16
        with pytest.warns(
            UserWarning, match=r"torch.autocast of torch.float16 inside engine.autocast\(\) of torch.bfloat16"
        ):
            assert functional.softmax(torch.ones(2, dtype=torch.float16), -1).dtype == torch.float32
        functional.softmax(torch.ones(2), -1)
    with engine.autocast(), torch.autocast("cpu", enabled=False):
        assert functional.softmax(torch.ones(2), -1).dtype == torch.float32


def test_rules_nest_and_end_with_their_block():
    with OpRules({"exp": "fp32"}, device_type="cpu", lower=LOW):
        assert torch.exp(torch.ones(1, dtype=LOW)).dtype == torch.float32
    assert torch.exp(torch.ones(1, dtype=LOW)).dtype == LOW
    assert torch.nn.functional.softmax in functions_named("softmax")


# ---- tf32 ----


def test_tf32_is_switched_on_for_the_block_and_back_to_what_it_was():
    before = torch.backends.cuda.matmul.fp32_precision
    with CUDADevice(torch.device("cuda", 0)).tf32():
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before
    with device_named("cpu").tf32():
        assert torch.backends.cuda.matmul.fp32_precision == before


def test_tf32_is_fp32_on_a_device_without_it():
    model, engine = engine_of("tf32")
    assert set(seen(engine, model).values()) == {torch.float32}
    with engine.autocast():
        loss = model(torch.ones(1, 8)).sum()
    engine.backward(loss)
    assert engine.step().applied


# ---- what the engine says about it ----


def test_the_dtype_contract_is_read_from_the_tensors():
    contract = engine_of("bf16-true", keep_fp32=["norm"])[1].dtypes()
    assert contract.parameter == "bfloat16, float32"
    assert (contract.compute, contract.master, contract.moments) == ("bfloat16, float32", "float32", "float32")
    assert (contract.accumulation, contract.reduction, contract.buffers) == ("float32", "float64", "none")
    assert "accumulation  float32" in str(contract)


@pytest.mark.parametrize(
    ("precision", "settings", "master"),
    [
        ("fp32", {}, "the parameter itself"),
        ("tf32", {}, "the parameter itself"),
        ("bf16-true", {"master_weights": "remainder"}, "float32 (bfloat16 + 16 bits)"),
        ("bf16-true", {"master_weights": "none"}, "none"),
        ("bf16-sr", {}, "none (stochastic rounding)"),
        ("bf16-kahan", {}, "float32 (16 + 16 bits, compensated)"),
    ],
)
def test_the_contract_says_what_carries_the_masters_bits(precision, settings, master):
    assert engine_of(precision, **settings)[1].dtypes().master == master


def test_a_moment_that_somebody_cast_breaks_the_contract_loudly():
    model, engine = engine_of("bf16-mixed")
    with engine.autocast():
        loss = model(torch.ones(1, 8)).sum()
    engine.backward(loss)
    engine.step()
    state = next(iter(engine.optimizers[0].state.values()))
    state["exp_avg"] = state["exp_avg"].bfloat16()
    with pytest.raises(AmpStateError, match="a moment is bfloat16, this precision promises float32; somebody cast it"):
        engine.dtypes()


def test_explain_names_the_deciding_rule_of_every_module():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Softmax(-1), nn.GELU(), nn.CrossEntropyLoss()
    )
    _, engine = engine_of(model=model, op_rules={"gelu": "lower_precision_fp"})
    table = engine.explain()
    assert [(one.compute, one.rule) for one in table.modules] == [
        ("bfloat16", "autocast on cpu: linear"),
        ("as its inputs", "parameters and statistics in fp32"),
        ("float32", "safe_ops: layer_norm"),
        ("float32", "safe_ops: softmax"),
        ("bfloat16", "op_rules: gelu"),
        ("float32", "safe_ops: cross_entropy"),
    ]
    assert "BatchNorm1d" in str(table)
    assert {one.rule for one in engine_of("fp32")[1].explain().modules} == {"precision=fp32"}


def test_explain_inside_an_emulation_names_the_rules_that_hold_there():
    _, engine = engine_of(model=nn.Sequential(nn.Linear(4, 4), nn.GRUCell(4, 4)))
    on_cpu = [one.rule for one in engine.explain().modules]
    with emulate("cuda"):
        emulated = [one.rule for one in engine.explain().modules]
    assert emulated == ["autocast on emulated cuda: linear", "autocast on emulated cuda: gru_cell"]
    assert [one.rule for one in engine.explain().modules] == on_cpu == ["autocast on cpu: linear"] * 2


def test_explain_says_which_outer_module_decided():
    model = nn.ModuleDict({"block": nn.Sequential(nn.Linear(2, 2), nn.Dropout())})
    _, engine = engine_of(model=model, keep_fp32=["block"])
    assert engine.explain()["block.0"].rule == "keep_fp32: block (of 'block')"
    assert engine_of(model=nn.Sequential(nn.Linear(1, 1), nn.Dropout()))[1].explain()["1"].rule == "no rule"


def test_the_engines_repr_is_a_readable_summary():
    _, engine = engine_of("fp16-mixed", max_grad_norm=None, accumulate_steps=2)
    assert repr(engine) == (
        "AmpEngine(precision='fp16-mixed', model=Net, 124 parameters in 6 tensors on cpu, optimizers: AdamW (fused), "
        "loss scale 65536.0 (dynamic), clipping off, window of 2, 0 updates applied)"
    )
