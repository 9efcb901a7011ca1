import threading

import ml_dtypes
import numpy as np
import pytest

from mp_reference.amp.autocast import active_autocast, autocast, eligible
from mp_reference.spec.formats import BF16, E4M3FN, FP16, FP32
from mp_reference.spec.op_rules import BANNED_MESSAGES, DEVICES, op_rules

SINGLE = np.array([1.0, 70000.0, 2.0**-30], np.float32)
HALF = np.array([1.0, 2.0], np.float16)
BRAIN = np.array([1.0, 2.0], ml_dtypes.bfloat16)
DOUBLE = np.array([1.0, 2.0], np.float64)
COUNTS = np.array([1, 2])


def dtypes(call):
    return [x.dtype.name for x in call.args]


@pytest.mark.parametrize("fmt", [FP16, BF16])
def test_lower_precision_casts_every_floating_argument_and_rounds_once(fmt):
    call = autocast("cuda", fmt).prepare("mm", SINGLE, HALF, BRAIN)
    assert dtypes(call) == [fmt.dtype.name] * 3
    expected = {FP16: [1.0, np.inf, 0.0], BF16: [1.0, 70144.0, 2.0**-30]}[fmt]
    assert call.args[0].astype(np.float64).tolist() == expected


def test_fp32_widens_both_16_bit_formats_and_leaves_the_rest():
    call = autocast("cuda", FP16).prepare("exp", HALF, BRAIN, DOUBLE, COUNTS)
    assert dtypes(call) == ["float32", "float32", "float64", "int64"]


def test_arguments_that_need_no_cast_are_the_same_objects():
    call = autocast("cuda", FP16).prepare("mm", HALF, DOUBLE, 3, None, "ij,jk->ik")
    assert call.args[0] is HALF
    assert call.args[1] is DOUBLE
    assert call.args[2:] == (3, None, "ij,jk->ik")


def test_arrays_on_another_device_are_left_alone():
    call = autocast("cuda", FP16).prepare("mm", SINGLE, SINGLE, devices=["cuda", "cpu"])
    assert dtypes(call) == ["float16", "float32"]


def test_a_device_list_of_another_length_is_refused():
    with pytest.raises(ValueError, match="mm: devices has 1 entries for 2 arguments; give one device type an argument"):
        autocast("cuda").prepare("mm", SINGLE, SINGLE, devices=["cuda"])


def test_sequences_of_arrays_are_cast_inside():
    call = autocast("cpu", BF16).prepare("cat", [BRAIN, SINGLE], 0)
    assert [x.dtype.name for x in call.args[0]] == ["float32", "float32"]
    assert isinstance(autocast("cuda").prepare("einsum", "i,i", (SINGLE, SINGLE)).args[1], tuple)


def test_promotion_goes_to_the_widest_and_float64_takes_no_part():
    amp = autocast("cuda", FP16)
    assert dtypes(amp.prepare("dot", HALF, HALF)) == ["float16", "float16"]
    assert dtypes(amp.prepare("dot", HALF, SINGLE)) == ["float32", "float32"]
    assert dtypes(amp.prepare("dot", HALF, DOUBLE)) == ["float16", "float64"]
    assert dtypes(amp.prepare("dot", SINGLE, BRAIN)) == ["float32", "float32"]


def test_promotion_of_the_other_16_bit_format_is_refused_with_a_way_out():
    message = (
        r"aten::dot promotes to the widest input, and bfloat16 beside fp16 has no widest; cast the input to fp16 or"
    )
    with pytest.raises(RuntimeError, match=message):
        autocast("cuda", FP16).prepare("dot", BRAIN, HALF)


def test_an_optional_bias_is_cast_but_takes_no_part_in_the_promotion():
    call = autocast("cuda", FP16).prepare("bilinear", HALF, HALF, HALF, SINGLE)
    assert dtypes(call) == ["float16"] * 4


def test_set_opt_dtype_leaves_inputs_and_gives_way_to_the_caller():
    amp = autocast("cuda", BF16)
    call = amp.prepare("softmax.int", BRAIN, 0)
    assert (call.args[0].dtype, call.dtype) == (BRAIN.dtype, FP32.dtype)
    assert amp.prepare("softmax.int", BRAIN, 0, dtype=FP16.dtype).dtype == FP16.dtype
    assert amp.prepare("sum", DOUBLE).dtype is None


def test_append_dtype_is_fp32_for_eligible_inputs_and_their_own_otherwise():
    amp = autocast("cuda", FP16)
    assert amp.prepare("norm.Scalar", HALF, 2).dtype == FP32.dtype
    assert amp.prepare("norm.Scalar", DOUBLE, 2).dtype == np.float64


@pytest.mark.parametrize("device", [device for device in DEVICES if device not in ("cpu", "mps")])
def test_binary_cross_entropy_is_banned_with_one_message_on_all_devices(device):
    with pytest.raises(RuntimeError, match="call binary_cross_entropy_with_logits on the logits") as caught:
        autocast(device).prepare("binary_cross_entropy", HALF, HALF)
    assert str(caught.value) == BANNED_MESSAGES["aten::binary_cross_entropy"]


def test_an_op_without_a_rule_and_a_disabled_region_change_nothing():
    for call in (autocast("cuda").prepare("relu", SINGLE), autocast("cuda", enabled=False).prepare("mm", SINGLE)):
        assert call.rule is None
        assert call.args[0] is SINGLE


def test_softmax_stays_in_16_bits_on_the_cpu_and_not_on_cuda():
    assert autocast("cpu", BF16).prepare("softmax", BRAIN).dtype is None
    assert autocast("cuda", BF16).prepare("softmax", BRAIN).dtype == FP32.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_every_row_of_every_device_is_interpreted(device):
    for op, row in op_rules(device).items():
        if row.rule != "banned":
            assert autocast(device, BF16).prepare(op, BRAIN, SINGLE).rule == row.rule


def test_the_innermost_region_decides_and_leaving_restores_also_after_an_error():
    assert active_autocast() is None
    with autocast("cuda", FP16) as outer:
        with autocast("cuda", BF16) as inner:
            assert active_autocast() is inner
        with pytest.raises(RuntimeError, match="banned"), autocast("cuda", BF16) as inner:
            inner.prepare("binary_cross_entropy", HALF, HALF)
        with autocast("cuda", enabled=False):
            assert active_autocast("cuda") is None
        with autocast("npu", BF16) as other:
            assert active_autocast() is other
            assert active_autocast("cuda") is outer
        assert active_autocast() is outer
        assert active_autocast("cpu") is None
    assert active_autocast() is None


def test_a_region_belongs_to_its_thread():
    seen = []
    with autocast("cuda"):
        thread = threading.Thread(target=lambda: seen.append(active_autocast()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_what_is_no_array_is_not_eligible():
    assert not eligible(1.0, "cuda", "cuda")
    assert eligible(np.float32(1.0), "cuda", "cuda")


def test_fp32_is_a_format_of_cuda_autocast_alone():
    assert dtypes(autocast("cuda", FP32).prepare("mm", HALF)) == ["float32"]
    with pytest.raises(ValueError, match="autocast on npu does not take fp32; use FP16 or BF16, or round_to for other"):
        autocast("npu", FP32)


def test_a_format_without_autocast_and_an_unknown_device_are_refused():
    with pytest.raises(ValueError, match=r"autocast on cuda does not take float8_e4m3fn; use FP16 or BF16 or FP32, or"):
        autocast("cuda", E4M3FN)
    with pytest.raises(
        ValueError, match=r"device='gpu' has no op rules; autocast knows cuda, cpu, xpu, mps, mtia, maia"
    ):
        autocast("gpu")
