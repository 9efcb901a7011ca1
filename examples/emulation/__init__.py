"""Three models on a laptop under an accelerator's mixed precision: what fp16 and bf16 do to them, and what helps."""
