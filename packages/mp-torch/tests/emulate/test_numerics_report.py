import json
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mp_reference as mp
from mp_torch import AmpConfig, AmpEngine
from mp_torch.emulate import NumericsReport, emulate
from mp_torch.emulate.advice import judge
from mp_torch.emulate.magnitudes import LOWEST, Magnitudes, measure
from mp_torch.emulate.numerics_report import Row
from mp_torch.emulate.places import OUTSIDE, Places
from mp_torch.errors import AmpConfigError, AmpStateError


def rows_of(report, **wanted):
    return [row for row in report.rows() if all(row[key] == value for key, value in wanted.items())]


@pytest.mark.parametrize("fmt", [mp.FP16, mp.BF16])
def test_counts_are_those_of_rounding_each_value(fmt):
    generator = np.random.default_rng(0)
    exponents = generator.integers(fmt.min_exponent - fmt.mantissa_bits - 4, min(fmt.max_exponent + 3, 127), 20000)
    values = np.ldexp(generator.uniform(1, 2, 20000), exponents).astype(np.float32)
    edges = np.float32([fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.min_subnormal / 2, 0.0])
    values = np.concatenate([values, edges, np.nextafter(edges, np.float32(1e38)), -edges])
    rounded = np.abs(mp.round_to(values, fmt).astype(np.float64))
    found = measure(torch.from_numpy(values), fmt)
    assert found.overflows == int(np.isinf(rounded).sum() - np.isinf(values).sum())
    assert found.underflows == int(((rounded == 0) & (values != 0)).sum())
    tiny = (np.abs(values) < fmt.min_normal) & (rounded > 0)
    assert found.subnormals == int(tiny.sum())
    assert found.zeros == int((values == 0).sum())
    assert found.max_abs == np.abs(values).max()


def test_histograms_count_binary_exponents_of_unscaled_values():
    found = measure(torch.tensor([1.0, 1.5, 2.0, -4.0, 0.0, math.inf]), mp.FP16, scale=4.0)
    filled = {int(place) + LOWEST: int(found.histogram[place]) for place in np.flatnonzero(found.histogram)}
    assert filled == {-2: 2, -1: 1, 0: 1}
    assert found.max_abs == 1.0


def test_hardware_that_flushes_subnormals_loses_them_to_zero():
    values = torch.tensor([2.0**-20, 2.0**-14])
    assert measure(values, mp.FP16, subnormals=False).underflows == 1
    assert measure(values, mp.FP16).underflows == 0


def test_what_came_in_broken_is_not_counted_as_made_here():
    broken = torch.tensor([math.inf, math.nan])
    assert (measure(broken, mp.FP16, fresh=False).overflows, measure(broken, mp.FP16, fresh=False).nans) == (0, 0)
    assert (measure(broken, mp.FP16).overflows, measure(broken, mp.FP16).nans) == (1, 1)


def test_headroom_is_in_doublings_and_nothing_has_infinite_headroom():
    assert Magnitudes(max_abs=65504.0 / 8).headroom(mp.FP16) == 3.0
    assert Magnitudes().headroom(mp.FP16) == math.inf
    assert measure(torch.zeros(0), mp.FP16).max_abs == 0.0
    assert Magnitudes().flushed_share == Magnitudes().flushed_at(mp.FP16, 0) == 0.0


def test_ops_belong_to_the_module_that_runs_and_their_gradients_to_the_same():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with emulate("cuda", precision="fp16-mixed"), NumericsReport(model) as report:
        (model(torch.randn(3, 4)).float() * 2).sum().backward()
    assert {row["module"] for row in rows_of(report, op="addmm", phase="forward")} == {"0", "1.0"}
    assert {row["module"] for row in rows_of(report, op="mm", phase="backward")} == {"0", "1.0"}
    assert {row["module"] for row in rows_of(report, op="threshold_backward")} == {"1.1"}
    assert rows_of(report, module=OUTSIDE, phase="backward", op="_to_copy")


def test_a_checkpoint_s_recomputation_counts_as_forward_of_its_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with emulate("cuda", precision="fp16-mixed"), NumericsReport(model) as report:
        x = torch.randn(3, 4, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).float().sum().backward()
    (row,) = rows_of(report, module="0", op="addmm", phase="forward")
    assert row["calls"] == 2


def test_places_forget_old_marks_and_the_hooks_go_away(monkeypatch):
    monkeypatch.setattr("mp_torch.emulate.places._KEPT", 4)
    model = nn.Sequential(nn.ReLU())
    places = Places(model)
    for _ in range(10):
        model(torch.ones(1))
    assert len(places._starts) <= 12
    assert places.now() == (OUTSIDE, False)
    places.remove()
    assert not model._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_a_module_that_raises_is_left_as_well():
    class Broken(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError(x)

    model = Broken()
    places = Places(model)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1))
    assert places.now() == (OUTSIDE, False)
    places.remove()


def test_overflow_and_underflow_are_seen_where_the_rounding_happens():
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[0].weight.data.fill_(300.0)
    model[1].weight.data.fill_(1e-8)
    with emulate("cuda", precision="fp16-mixed"), NumericsReport(model) as report:
        model(torch.full((1, 2), 300.0))
    (product,) = rows_of(report, module="0", op="mm")
    assert (product["overflows"], product["max_abs"]) == (1, 180000.0)
    (cast,) = [row for row in rows_of(report, module="1", op="_to_copy") if row["underflows"]]
    assert cast["flushed_share"] == 1.0
    assert product["headroom_bits"] < 0


def test_saturated_overflow_is_still_seen():
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.fill_(300.0)
    with emulate("npu", precision="fp16-mixed", overflow="saturate"), NumericsReport(layer) as report:
        assert layer(torch.full((1, 2), 300.0)).item() == 65504.0
    assert sum(row["overflows"] for row in report.rows()) == 1


def test_random_and_in_place_ops_are_counted_by_what_they_gave():
    layer = nn.Dropout(0.5)
    half = torch.full((64,), 4e4, dtype=torch.float16)
    with emulate("cuda"), NumericsReport(layer) as report:
        layer(half)
        half.add_(half)
    assert sum(row["overflows"] for row in rows_of(report, op="add_")) == 64
    assert all(row["calls"] == 1 for row in report.rows())


def test_an_op_that_cannot_be_repeated_in_fp32_is_counted_by_what_it_gave():
    def only_half(x):
        if x.dtype is not torch.float16:
            raise TypeError
        return x * 1

    library = torch.library.Library("mp_report_test", "FRAGMENT")
    library.define("only_half(Tensor x) -> Tensor")
    library.impl("only_half", only_half, "CPU")
    with NumericsReport(nn.Linear(1, 1)) as report:
        torch.ops.mp_report_test.only_half(torch.full((2,), 2.0**-20, dtype=torch.float16))
    (row,) = rows_of(report, op="mp_report_test::only_half")
    assert row["subnormals"] == 2
    library._destroy()


def small_gradients(scale=1.0, precision="fp16-mixed", judged="fp16-mixed", factor=1e-9):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with emulate("cuda", precision=precision), NumericsReport(model, precision=judged, loss_scale=scale) as report:
        loss = (model(torch.randn(16, 8)).float() * factor).sum()
        (loss * scale).backward()
    return report


def test_small_gradients_vanish_without_a_loss_scale_and_the_advice_names_one_that_keeps_them():
    lost = small_gradients()
    assert all(row["flushed_share"] == 1.0 for row in rows_of(lost, module=OUTSIDE, phase="backward"))
    report = small_gradients(precision="bf16-mixed")
    advice = report.advice()
    assert advice.trains
    assert advice.loss_scale >= 10
    assert "without one some gradients vanish" in str(advice)
    config = report.config(max_grad_norm=0.5)
    assert config == AmpConfig(precision="fp16-mixed", loss_scale=config.loss_scale, max_grad_norm=0.5)
    kept = small_gradients(scale=config.loss_scale.init_scale)
    assert sum(row["underflows"] for row in rows_of(kept, phase="backward")) == 0


def test_the_loss_scale_may_be_a_function_and_gradients_are_reported_without_it():
    plain = small_gradients(factor=1.0)
    scaled = small_gradients(scale=8.0, factor=1.0)
    assert [row["max_abs"] for row in plain.rows()] == [row["max_abs"] for row in scaled.rows()]
    layer = nn.Linear(1, 1)
    with emulate("cuda", precision="fp16-mixed"), NumericsReport(layer, loss_scale=lambda: 4.0) as report:
        (layer(torch.ones(1, 1)).float() * 4.0).sum().backward()
    (row,) = rows_of(report, module=OUTSIDE, phase="backward")
    assert row["max_abs"] == 1.0


def test_a_module_whose_forward_overflows_is_advised_to_stay_in_fp32_and_the_engine_takes_the_config():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[0].weight.data.fill_(3e4)
    x = torch.full((2, 4), 3.0)
    with emulate("cuda", precision="fp16-mixed"), NumericsReport(model) as report:
        model(x)
    assert report.advice().keep_fp32 == ("0",)
    assert "0 needs fp32: 8 overflows and 0 NaNs in its forward." in str(report.advice())
    with emulate("cuda"):
        config = report.config(max_grad_norm=None)
        engine = AmpEngine(model, torch.optim.SGD(model.parameters(), 1e-30), config=config)
        with engine.autocast():
            out = model(x)
        assert out.isfinite().all()


def row(module, phase, **counts):
    histogram = counts.pop("histogram", {})
    found = Magnitudes(**counts)
    for exponent, count in histogram.items():
        found.histogram[exponent - LOWEST] = count
    return Row(module, "mm", phase, 1, found)


def test_gradients_of_too_wide_a_range_need_fp32_and_too_different_modules_need_bf16():
    wide = row("wide", "backward", values=20, max_abs=2.0**14, histogram={14: 10, -40: 10})
    good = row("good", "backward", values=10, max_abs=1.0, histogram={0: 10})
    advice = judge([wide, good], mp.FP16, "fp16-mixed", 1e-3)
    assert advice.keep_fp32 == ("wide",)
    assert [one.safe_scales for one in advice.modules] == ["none", "2**-24 .. 2**14"]
    forward = judge([row("only", "forward", values=1, max_abs=1.0)], mp.FP16, "fp16-mixed", 1e-3)
    assert forward.modules[0].safe_scales == "any"
    assert "wide needs fp32: its gradients want a loss scale of at least 2**15 and at most 2**0." in str(advice)
    assert advice.loss_scale == 14
    assert "even without loss scaling; start from loss scale 2**14" not in str(advice)
    large = row("large", "backward", values=10, max_abs=2.0**13, histogram={13: 10})
    small = row("small", "backward", values=10, max_abs=2.0**-30, histogram={-30: 10})
    advice = judge([large, small], mp.FP16, "fp16-mixed", 1e-3)
    assert not advice.trains
    assert "Will not train in fp16-mixed: no loss scale keeps the gradients of all modules; take bf16-mixed." in str(
        advice
    )
    assert advice.config().precision == "bf16-mixed"


def test_healthy_gradients_need_no_loss_scale_and_bf16_has_none():
    good = row("good", "backward", values=10, max_abs=1.0, histogram={0: 10})
    assert str(judge([good], mp.FP16, "fp16-mixed", 1e-3)) == (
        "Will train in fp16-mixed, even without loss scaling; start from loss scale 2**14."
    )
    advice = judge([good], mp.BF16, "bf16-mixed", 1e-3)
    assert str(advice) == "Will train in bf16-mixed without loss scaling."
    assert advice.config() == AmpConfig(precision="bf16-mixed")


def test_the_table_shows_each_module_once_a_phase_and_losses_in_red():
    table = small_gradients().table()
    assert table.row_count == 7
    assert "red" in {line.style for line in table.rows}
    assert [column.header for column in table.columns][:2] == ["module", "phase"]
    scales = list(table.columns[-1].cells)
    assert table.columns[-1].header == "safe loss scale"
    assert scales[0] == ""
    assert any(cell.startswith("2**") for cell in scales)


def test_the_figure_has_a_panel_for_each_module_with_the_format_s_range_drawn_in(tmp_path):
    figure = small_gradients().plot(tmp_path / "report.svg")
    assert [axis.get_ylabel() for axis in figure.axes] == ["0", "1", "2", OUTSIDE]
    (bounds,) = {patch.get_x() + patch.get_width() for patch in figure.axes[0].patches[:1]}
    assert bounds == pytest.approx(math.log2(65504.0))
    assert (tmp_path / "report.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert small_gradients().plot().axes


def test_a_report_that_saw_nothing_draws_nothing():
    with pytest.raises(AmpStateError, match="has seen no 16-bit result; run a step inside `with report:` under"):
        NumericsReport(nn.Linear(1, 1)).plot()


def test_json_holds_rows_histograms_and_advice(tmp_path):
    report = small_gradients(precision="bf16-mixed")
    text = report.json(tmp_path / "report.json")
    found = json.loads(text)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == found
    assert found["trains"] is True
    assert found["loss_scale"] == 2.0 ** report.advice().loss_scale
    assert len(found["rows"]) == len(report.rows())
    gradients = [one for one in found["modules"] if one["highest_safe_loss_scale"] is not None]
    assert all(one["lowest_safe_loss_scale"] <= one["highest_safe_loss_scale"] for one in gradients)
    assert not any(one["needs_fp32"] for one in found["modules"])
    assert sum(found["rows"][0]["log2_histogram"].values()) + found["rows"][0]["zeros"] == found["rows"][0]["values"]
    assert report.json() == text


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.table", None)
    with pytest.raises(AmpStateError, match=r"this view needs rich; pip install 'mp-torch\[report\]'"):
        small_gradients().table()


def test_a_precision_without_16_bits_is_refused():
    with pytest.raises(AmpConfigError, match="precision='fp32' has no 16-bit format to judge; choose one of"):
        NumericsReport(nn.Linear(1, 1), precision="fp32")
