"""Bytes for each parameter by role, held against the figures that the papers print."""

import pytest

from mp_reference.spec.memory import CARRIERS, ROLES, SHARDING, STORAGE, bytes_per_parameter, moment_count


def test_adam_with_fp32_masters_keeps_the_sixteen_bytes_of_the_zero_paper():
    """Section 3.1 of ZeRO: 2 + 2 for fp16 weights and gradients, K = 12 for the optimizer's fp32 copies."""
    kept = bytes_per_parameter("fp16-true", moments=2)
    assert kept == {"weights": 2.0, "masters": 4.0, "gradients": 2.0, "moments": 8.0}
    assert kept["masters"] + kept["moments"] == 12.0


@pytest.mark.parametrize(
    ("precision", "total"),
    [("fp32", 16.0), ("tf32", 16.0), ("fp16-mixed", 16.0), ("bf16-mixed", 16.0), ("fp16-true", 16.0),
     ("bf16-true", 16.0), ("bf16-sr", 12.0), ("bf16-kahan", 14.0)],
)  # fmt: skip
def test_the_total_counts_masters(precision, total):
    assert sum(bytes_per_parameter(precision).values()) == total


@pytest.mark.parametrize(("kind", "masters"), [("fp32", 4.0), ("remainder", 2.0), ("none", 0.0)])
def test_each_kind_of_master_weights_has_its_width(kind, masters):
    assert bytes_per_parameter("bf16-true", master_weights=kind)["masters"] == masters
    assert bytes_per_parameter("bf16-kahan", master_weights=kind)["masters"] == 2.0  # the compensation, in any case
    assert bytes_per_parameter("bf16-mixed", master_weights=kind)["masters"] == 0.0


def test_every_precision_gives_every_role():
    for precision in STORAGE:
        assert tuple(bytes_per_parameter(precision, moments=0)) == ROLES


def test_unknown_words_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"precision='fp64' is not one of fp32, tf32, .*bf16-kahan; choose one"):
        bytes_per_parameter("fp64")
    with pytest.raises(ValueError, match=r"master_weights='fp64' is not one of fp32, remainder, none; choose one"):
        bytes_per_parameter("bf16-true", master_weights="fp64")
    with pytest.raises(ValueError, match=r"optimizer 'lion' is not one of sgd, adam, adamw; name the one that keeps"):
        moment_count("lion")


def test_moments_follow_the_optimizers_settings():
    assert moment_count("sgd") == 0
    assert moment_count("sgd", momentum=0.9) == 1
    assert moment_count("adam") == moment_count("adamw") == 2
    assert moment_count("adamw", amsgrad=True) == 3


def test_each_stage_of_zero_shards_what_the_one_before_does_and_more():
    stages = [set(SHARDING[name]) for name in ("none", "zero1", "zero2", "zero3")]
    assert [len(stage) for stage in stages] == [0, 2, 3, 4]
    assert all(stages[i] < stages[i + 1] for i in range(3))
    assert set(SHARDING["fsdp"]) == stages[3] == set(ROLES)


def test_the_carriers_are_the_ones_that_the_engine_offers():
    assert CARRIERS == {"fp32": "fp32", "remainder": "bf16", "none": None}
