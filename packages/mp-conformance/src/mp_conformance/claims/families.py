"""One sentence a family of claims: README's guarantees, and the headings of the report."""

from __future__ import annotations

__all__ = ["FAMILIES"]

FAMILIES: dict[str, str] = {
    "format": "Every format's range, subnormals, epsilon and codes are those that its standard gives",
    "cast": "Every cast, from every format, float32, float64 and int64, rounds exactly once",
    "rounding": "Every rounding mode, saturation and flushing gives what the exact oracle gives, in every format",
    "producer": "Each library's own casts (NaN, overflow, double rounding) are what the rows of `spec.casts` say",
    "arithmetic": "+, -, ×, ÷, sqrt and fma are the exact result rounded once, in every format and rounding",
    "comparison": "Comparisons, minimum and maximum follow IEEE 754 for NaN, infinities and zeros",
    "flags": "Exception flags are those that the exact result calls for",
    "elementary": "exp, log, tanh and their kin are within the stated ulps for all 65,536 inputs of fp16 and bf16",
    "sum": "Sums and norms keep an a-priori error bound, and a declared order bit by bit",
    "matmul": "Matrix products keep an a-priori error bound, and a declared accumulator bit by bit",
    "op-rules": "`torch.autocast` casts before each op as the rows of `spec.op_rules` say, on seven devices",
    "emulation": "CPU tensors under `emulate` get from every op, forward and backward, what CUDA's dispatcher gives",
    "two-trainings": "A network trained by the engine and by the NumPy reference has the same bits in every step",
    "op-bits": "In 16 bits, too, the reference's operations have the bits of torch's autograd with exact products",
    "op-gradients": "The reference's gradients are those of torch's autograd",
    "loss-scale": "The loss scale moves as its policy says, and every preset as the recorded original did",
    "clipping": "Clipping measures the exact norm, rounds it once, and overflows for no finite gradients",
    "optimizer": "Every SGD, Adam, AdamW update is its equations, each operation rounded once; fused, within a bound",
    "step": "A step over any history of finite, infinite and NaN gradients leaves the oracle's bits, or no trace",
    "accumulation": "An update over a window is that of the mean of its micro-steps, short last windows included",
    "saturation": "Where hardware saturates instead of overflowing, a step that overflowed is skipped all the same",
    "resume": "Saving and resuming after any micro-step changes no later bit",
    "ranks": "Replicas, shards, tensor parallel ranks and pipeline stages decide together and leave one process's bits",
    "vectors": "Every line of the golden files is the exact oracle's, and comes out of every implementation",
    "stochastic": "Stochastic rounding is unbiased, repeatable, and equal on every replica",
}
"""The first word of a claim's id -> what the family guarantees."""
