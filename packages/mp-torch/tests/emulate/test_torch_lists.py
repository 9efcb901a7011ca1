"""torch's own lists of what autocast does on CUDA, with torch's own check, on CPU tensors."""

import pytest
import torch

from mp_torch.emulate import emulate

pytest.importorskip("expecttest", reason="torch's own test helpers import expecttest; pip install expecttest")
lists = pytest.importorskip("torch.testing._internal.autocast_test_lists", reason="torch without its test lists")

LISTS = lists.AutocastTestLists("cpu")
NEEDS_CUDNN = {"cudnn_convolution", "cudnn_convolution_transpose"}


def rows(name, dtype, module):
    for number, row in enumerate(getattr(LISTS, name)):
        op, args = row[0], row[1]
        if op in NEEDS_CUDNN:
            continue  # there is no cuDNN kernel for CPU tensors
        options = row[2] if len(row) == 3 and isinstance(row[2], dict) else {}
        if len(row) == 3 and not isinstance(row[2], dict | bool):
            continue  # torch's own test takes the third entry of this row, operands, for "skip me"
        yield pytest.param(op, args, dtype, module, options, id=f"{name}-{op}-{number}")


LOW, WIDE = torch.float16, torch.float32
CASES = [
    *rows("torch_fp16", LOW, torch),
    *rows("torch_fp32", WIDE, torch),
    *rows("torch_need_autocast_promote", WIDE, torch),
    *rows("nn_fp16", LOW, torch._C._nn),
    *rows("nn_fp32", WIDE, torch._C._nn),
    *rows("linalg_fp16", LOW, torch._C._linalg),
    *rows("methods_fp16", LOW, None),
    *rows("methods_fp32", WIDE, None),
]


@pytest.mark.filterwarnings("ignore:Using torch.cross without", "ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize(("op", "args", "dtype", "module", "options"), CASES)
def test_an_op_of_the_cuda_lists_passes_torchs_own_check_on_cpu_tensors(op, args, dtype, module, options):
    checker = lists.TestAutocast()
    with emulate("cuda"):
        checker._run_autocast_outofplace(op, args, dtype, "cpu", module=module, add_kwargs=options, amp_dtype=LOW)


@pytest.mark.parametrize("kind", ["torch_expect_builtin_promote", "methods_expect_builtin_promote"])
def test_ops_that_promote_by_themselves_pass_torchs_own_check(kind):
    checker = lists.TestAutocast()
    module = torch if kind.startswith("torch") else None
    with emulate("cuda"):
        for op, args, out_type in getattr(LISTS, kind):
            checker._run_autocast_outofplace(op, args, WIDE, "cpu", out_type, module, amp_dtype=LOW)


def test_the_banned_op_of_the_cuda_lists_is_refused():
    with emulate("cuda", precision="fp16-mixed"):
        for op, args, module in LISTS.banned:
            with pytest.raises(RuntimeError, match="banned under autocast"):
                getattr(module, op)(*args)
