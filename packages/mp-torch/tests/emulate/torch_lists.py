"""Check every row of torch's own CUDA autocast lists on CPU tensors, with torch's own checker; one line a row.

A script of its own, because importing torch's test helpers freezes flags of the process.
"""

import sys
import warnings

import torch
from torch.testing._internal import autocast_test_lists

from mp_torch.emulate import emulate

NEEDS_CUDNN = {"cudnn_convolution", "cudnn_convolution_transpose"}
LOW, WIDE = torch.float16, torch.float32
LISTS = {
    "torch_fp16": (LOW, torch),
    "torch_fp32": (WIDE, torch),
    "torch_need_autocast_promote": (WIDE, torch),
    "nn_fp16": (LOW, torch._C._nn),
    "nn_fp32": (WIDE, torch._C._nn),
    "linalg_fp16": (LOW, torch._C._linalg),
    "methods_fp16": (LOW, None),
    "methods_fp32": (WIDE, None),
    "torch_expect_builtin_promote": (WIDE, torch),
    "methods_expect_builtin_promote": (WIDE, None),
}


def check(checker, row, dtype, module):
    """Whether torch's checker accepts the row; None for a row that torch's own test leaves out."""
    op, args, *rest = row
    if op in NEEDS_CUDNN or (rest and not isinstance(rest[0], dict | bool | torch.dtype)):
        return None  # of einsum's row torch's own test takes the third entry, the operands, for "skip me"
    options = rest[0] if rest and isinstance(rest[0], dict) else {}
    out_type = rest[0] if rest and isinstance(rest[0], torch.dtype) else None
    try:
        checker._run_autocast_outofplace(op, args, dtype, "cpu", out_type, module, options, amp_dtype=LOW)
    except (AssertionError, RuntimeError) as difference:
        return str(difference).splitlines()[0]
    return True


def main(emulated):
    warnings.simplefilter("ignore")
    lists, checker = autocast_test_lists.AutocastTestLists("cpu"), autocast_test_lists.TestAutocast()
    with emulate(emulated):
        for name, (dtype, module) in LISTS.items():
            for row in getattr(lists, name):
                print(f"{name} {row[0]}: {check(checker, row, dtype, module)}")
        for op, args, module in lists.banned:
            try:
                with torch.autocast("cpu", dtype=LOW):
                    getattr(module, op)(*args)
            except RuntimeError as refusal:
                print(f"banned {op}: {'is banned under autocast' in str(refusal)}")


if __name__ == "__main__":
    main(sys.argv[1])
