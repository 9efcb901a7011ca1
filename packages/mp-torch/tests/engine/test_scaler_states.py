"""States of other libraries' loss scalers, in and out."""

import pytest
import torch
from torch import nn

import mp_reference as mp
from mp_torch import AmpConfigError, AmpEngine, CheckpointError, LossScale
from mp_torch.scaler_states import SCALERS, export_state, import_state
from mp_torch.scaling import ScaleState


def engine_with(policy):
    model = nn.Linear(1, 1)
    return AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16-mixed", loss_scale=policy)


def test_torchs_own_scaler_takes_our_state_and_gives_it_back():
    policy = LossScale(init_scale=512.0, growth_interval=7)
    engine = engine_with(policy)
    engine.scale.resume_(ScaleState(scale=256.0, growth_tracker=3, hysteresis_tracker=1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(engine.export_scaler("torch.amp"))
    scaler.scale(torch.ones(1))
    assert scaler.get_scale() == 256.0
    assert scaler.state_dict()["_growth_tracker"] == 3
    other = engine_with(policy)
    other.import_scaler("torch.amp", scaler.state_dict())
    assert other.scale.state == engine.scale.state


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("tracker", [0, 1, 2])
def test_export_and_import_are_inverse(kind, tracker):
    policy = LossScale(growth_interval=3, hysteresis=2)
    state = ScaleState(scale=8.0, growth_tracker=tracker, hysteresis_tracker=2)
    assert import_state(kind, policy, export_state(kind, policy, state)) == state


@pytest.mark.parametrize("steps", range(12))
def test_a_deepspeed_run_is_continued_exactly_where_it_stopped(steps):
    """DeepSpeed counts iterations since the last overflow and grows by their remainder, one step late at first."""
    policy = LossScale.preset("deepspeed", init_scale=16.0, growth_interval=4, on_floor="keep")
    reference = mp.LossScale.preset("deepspeed", init_scale=16.0, growth_interval=4, on_floor="keep")
    state, last = reference.initial(), -1
    flags = [step in (2, 7) for step in range(24)]
    for step in range(steps):
        state = reference.next(state, flags[step])
        last = step if flags[step] else last
    saved = {
        "dynamic_loss_scale": True, "cur_scale": state.scale, "cur_iter": steps, "last_overflow_iter": last,
        "scale_factor": 2.0, "scale_window": 4, "cur_hysteresis": max(state.hysteresis_tracker, 1),
    }  # fmt: skip
    ours = import_state("deepspeed", policy, saved)
    for step in range(steps, 24):
        state = reference.next(state, flags[step])
        ours = ours.after_overflow(policy) if flags[step] else ours.after_good_step(policy)
        assert ours.scale == state.scale


def test_a_fused_deepspeed_scaler_saves_no_hysteresis_and_gets_a_full_one():
    saved = {
        "dynamic_loss_scale": True, "cur_scale": 8.0, "cur_iter": 3, "last_overflow_iter": -1, "scale_factor": 2.0,
        "scale_window": 1000,
    }  # fmt: skip
    assert import_state("deepspeed", LossScale(hysteresis=4), saved).hysteresis_tracker == 4


def test_an_unknown_scaler_is_answered_with_the_nearest_and_all_known_ones():
    with pytest.raises(AmpConfigError, match=r"kind='megatorn' is no known scaler, did you mean 'megatron'\?; known: "):
        engine_with(None).export_scaler("megatorn")


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({}, "a torch.amp scaler state has the key 'scale', this one has none"),
        (
            {
                "scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1, "_growth_tracker": 0,
                "scael": 1.0,
            },
            "a torch.amp scaler state has no key 'scael', did you mean 'scale'?",
        ),
        (
            {"scale": 0.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1, "_growth_tracker": 0},
            "scale=0.0 of the torch.amp scaler must be finite and above 0 in fp32; start afresh",
        ),
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused_and_changes_nothing(saved, message):
    engine = engine_with(None)
    with pytest.raises(CheckpointError) as caught:
        engine.import_scaler("torch.amp", saved)
    assert str(caught.value) == message
    assert engine.loss_scale == 65536.0
