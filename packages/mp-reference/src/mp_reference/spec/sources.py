"""The documents that the rows of the spec cite."""

IEEE_754 = "IEEE 754-2019"
IEEE_754_TABLE = "IEEE 754-2019, table 3.5"
BF16_WHITE_PAPER = "Intel, BFLOAT16 Hardware Numerics Definition, rev 1.0 (2018)"
NVIDIA_A100 = "NVIDIA A100 Tensor Core GPU Architecture, v1.0 (2020)"
OCP_OFP8 = "OCP 8-bit Floating Point Specification (OFP8), rev 1.0 (2023)"
OCP_MX = "OCP Microscaling Formats (MX) Specification, v1.0 (2023)"
FNUZ_PAPER = "Noune et al., 8-bit Numerical Formats for Deep Neural Networks, arXiv 2206.02915 (2022)"
