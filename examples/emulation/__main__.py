"""Run the comparisons: ``python -m examples.emulation`` (``--steps 40`` for a short look, ``--plot report.png``)."""

from __future__ import annotations

import argparse

import torch
from torch import nn

from examples.emulation import data, effects
from examples.emulation.compare import compare, look
from examples.emulation.models import ByteGpt, SmallResNet, WaveLstm


def small_loss(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A squared error with a small weight, as an auxiliary loss has it: its gradients are tiny."""
    return 1e-6 * nn.functional.mse_loss(predicted, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80, help="training steps of each recipe")
    parser.add_argument("--plot", default=None, help="write the GPT's numerics report there, as .png or .svg")
    options = parser.parse_args()
    torch.set_num_threads(1)

    text = data.bytes_of_python(options.steps)
    gpt = compare("Byte-level GPT on Python's own source", ByteGpt, text, nn.functional.cross_entropy, 3e-3)
    resnet = compare(
        "ResNet on scikit-learn's digits", SmallResNet, data.digits(options.steps), nn.functional.cross_entropy, 5e-3
    )
    wave = data.increments(options.steps)
    lstm = compare("LSTM on increments of a wave, with a loss weight of 1e-6", WaveLstm, wave, small_loss, 1e-2)
    for outcomes in (gpt, resnet):
        for recipe in ("fp16", "bf16"):  # 16 bits cost next to nothing where nothing overflows or vanishes
            assert abs(outcomes[recipe].last - outcomes["fp32"].last) < 0.1 * outcomes["fp32"].first
    left = {recipe: found.last / found.first for recipe, found in lstm.items()}
    assert max(left["fp16"], left["bf16"]) < 1.5 * left["fp32"] < 0.5
    assert left["fp16 unscaled"] > 0.9  # its gradients became zero

    print("\nNumerics of the GPT")
    report = look(ByteGpt, text, nn.functional.cross_entropy)
    print(report.advice())
    print("\nNumerics of the LSTM")
    print(look(WaveLstm, wave, small_loss).advice())
    if options.plot:
        report.plot(options.plot)

    print("\nClassical effects")
    frozen, moving = effects.frozen_weight("none"), effects.frozen_weight("fp32")
    print(f"a bf16 weight at 1.0 after 200 steps of 0.0019: {frozen} without masters, {moving:.3f} with fp32 masters")
    assert frozen == 1.0
    assert abs(moving - 0.62) < 0.01
    stale, fresh = effects.losses_inside_one_autocast(), effects.losses_of_the_engine()
    print(f"losses of a loop inside one autocast region: {[round(loss, 4) for loss in stale]}")
    print(f"losses of the engine in the same region:     {[round(loss, 4) for loss in fresh]}")
    assert len(set(stale)) == 1
    assert sorted(set(fresh), reverse=True) == fresh
    positions = effects.distinct_positions(torch.bfloat16)
    print(f"positions of 4,096 that differ in bf16: {positions}")
    assert positions == 769


if __name__ == "__main__":
    main()
