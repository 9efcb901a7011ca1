"""The configuration: frozen, validated, and the same after dict, JSON and TOML."""

import copy
import dataclasses
import math
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mp_torch import AmpConfig, AmpConfigError, AmpEngine, LossScale
from mp_torch.dtypes import PRECISIONS, precision_named
from mp_torch.regions import matching


@st.composite
def configs(draw):
    """Legal configurations."""
    precision = draw(st.sampled_from([*PRECISIONS, "auto"]))
    masters = ["fp32", "remainder", "none"] if precision == "bf16-true" else ["fp32"]
    return AmpConfig(
        precision=precision,
        loss_scale=draw(st.sampled_from([None, LossScale(), LossScale.static(0.5), LossScale(skip_limit=None)])),
        max_grad_norm=draw(st.none() | st.floats(1e-30, 1e30)),
        norm_type=draw(st.sampled_from([2.0, math.inf])),
        clip_value=draw(st.none() | st.floats(1e-30, 1e30)),
        accumulate_steps=draw(st.integers(1, 100)),
        keep_fp32=draw(st.sampled_from([(), ("*.norm", nn.LayerNorm), [re.compile("a.b")]])),
        lower=draw(st.sampled_from([(), ("head",)])),
        op_rules=draw(st.sampled_from([{}, {"softmax": "fp32", "exp": "promote"}])),
        master_weights=draw(st.sampled_from(masters)),
        seed=draw(st.integers(0, 2**64 - 1)),
        restore_buffers=draw(st.booleans()),
    )


@given(configs())
def test_a_config_is_equal_after_dict_json_and_toml(config):
    assert AmpConfig.from_dict(config.to_dict()) == config
    assert AmpConfig.from_json(config.to_json()) == config
    assert AmpConfig.from_toml(config.to_toml()) == config


def test_a_config_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AmpConfig().precision = "fp32"
    with pytest.raises(TypeError):
        AmpConfig("fp32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "bf16_mixed"}, "precision='bf16_mixed' is not a precision, did you mean 'bf16-mixed'?; it must"),
        ({"skip": "some"}, "skip='some' must be one of 'all', 'each'"),
        ({"nonfinite": "warn"}, "nonfinite='warn' must be one of 'skip', 'raise'"),
        ({"update": "slow"}, "update='slow' must be one of 'auto', 'fused', 'exact'"),
        ({"divide": "never"}, "divide='never' must be one of 'before', 'after', 'split'"),
        ({"restore_buffers": 1}, "restore_buffers=1 must be True or False"),
        ({"accumulate_steps": 0}, "accumulate_steps=0 must be a whole number from 1 up"),
        ({"accumulate_steps": 1.5}, "accumulate_steps=1.5 must be a whole number from 1 up"),
        ({"seed": -1}, "seed=-1 must be a whole number in [0, 2**64)"),
        ({"clip_value": 0.0}, "clip_value=0.0 must be a finite number above 0; None switches clipping off"),
        ({"norm_type": 0.5}, "norm_type=0.5 must be a number from 1.0 to 7.0, whose powers of fp32 gradients "),
        ({"norm_type": 300.0}, "norm_type=300.0 must be a number from 1.0 to 7.0, whose powers of fp32 gradients"),
        ({"norm_type": "inf"}, "norm_type='inf' must be a number from 1.0 to 7.0, whose powers of fp32 gradients"),
        ({"norm_type": 3.0, "update": "exact"}, "norm_type=3.0 has no correctly rounded form; with update='exact' use"),
        ({"loss_scale": 1024.0}, "loss_scale=1024.0 must be a LossScale; write LossScale.static(1024.0) for a fixed"),
        (
            {"op_rules": {"exp": "bf16"}},
            "op_rules['exp']='bf16' must be one of 'fp32', 'lower_precision_fp', 'promote'",
        ),
        ({"loss_scale": 1024}, "loss_scale=1024 must be a LossScale; write LossScale.static(1024.0) for a fixed"),
        ({"loss_scale": "dynamic"}, "loss_scale='dynamic' must be a LossScale; write LossScale.static(1024.0)"),
        ({"op_rules": ["exp"]}, "op_rules=['exp'] must map names of functions to rules, such as {'softmax': 'fp32'}"),
        ({"op_rules": {1: "fp32"}}, "op_rules[1]: a function is named by a string, such as 'softmax'"),
        ({"precision": "bf16"}, "precision='bf16' is not a precision, did you mean 'bf16-mixed'?; it must be one of"),
        ({"precision": "fp16"}, "precision='fp16' is not a precision, did you mean 'fp16-mixed'?; it must be one of"),
        ({"keep_fp32": {"norm"}}, "keep_fp32={'norm'} must be a list of patterns, or a tuple"),
        ({"keep_fp32": [re.compile(b"n")]}, "keep_fp32 has re.compile(b'n'), which must be a name pattern, a module"),
        ({"keep_fp32": "norm"}, "keep_fp32='norm' must be a list of patterns, such as ['norm']"),
        ({"keep_fp32": [3]}, "keep_fp32 has 3, which must be a name pattern, a module class or a compiled regex"),
        ({"lower": ["re:("]}, "lower has 're:(', which is no regular expression: "),
        ({"master_weights": "none"}, "master_weights='none' concerns the -true precisions, precision='fp16-mixed'"),
        (
            {"master_weights": "remainder", "precision": "fp16-true"},
            "master_weights='remainder' completes bf16 weights",
        ),
    ],
)
def test_what_no_step_could_honour_is_refused_with_the_way_out(settings, message):
    with pytest.raises(AmpConfigError, match=r"^" + re.escape(message)):
        AmpConfig(**settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        AmpConfig(**settings)
    with pytest.raises(AmpConfigError, match=r"^" + re.escape(message)):
        AmpConfig.from_dict(settings)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"presicion": "fp32"}, "unknown key 'presicion' in the config, did you mean 'precision'?; known: precision, "),
        ({"loss_scale": {"init": 1.0}}, "unknown key 'init' in loss_scale, did you mean 'init_scale'?; known: "),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_known_name(plain, message):
    with pytest.raises(AmpConfigError, match=r"^" + re.escape(message)):
        AmpConfig.from_dict(plain)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: AmpConfig.from_dict(None), "the config is None, which must be a mapping of names to values"),
        (lambda: AmpConfig.from_dict([]), "the config is [], which must be a mapping of names to values"),
        (lambda: AmpConfig.from_json("[]"), "the config is [], which must be a mapping of names to values"),
        (lambda: AmpConfig.from_json("{"), "the config is no JSON: "),
        (lambda: AmpConfig.from_toml("seed ="), "the config is no TOML: "),
        (
            lambda: AmpConfig.from_dict({"loss_scale": {"init_scale": -1.0}}),
            "loss_scale: init_scale=-1.0 must be finite and above 0; 65536.0 is the usual start",
        ),
        (
            lambda: AmpConfig.from_dict({"loss_scale": {"growth_interval": "often"}}),
            "loss_scale: growth_interval='often' must be a whole number, got str; write 2000",
        ),
    ],
)
def test_what_is_no_config_is_refused_with_the_reason(read, message):
    with pytest.raises(AmpConfigError, match=r"^" + re.escape(message)):
        read()


def test_equal_configs_have_equal_hashes_and_serve_as_keys():
    one = AmpConfig(max_grad_norm=1, op_rules={"exp": "fp32", "pow": "fp32"}, loss_scale=LossScale(init_scale=8))
    other = AmpConfig(max_grad_norm=1.0, op_rules={"pow": "fp32", "exp": "fp32"}, loss_scale=LossScale(init_scale=8.0))
    assert one == other
    assert {one: "runs"}[other] == "runs"
    assert hash(one) != hash(dataclasses.replace(one, seed=1))


def test_the_rules_of_a_config_stay_as_they_are():
    given = {"exp": "fp32"}
    config = AmpConfig(op_rules=given)
    given["pow"] = "fp32"
    with pytest.raises(AmpConfigError, match=r"^op_rules of a config cannot be changed; dataclasses\.replace"):
        config.op_rules["pow"] = "fp32"
    assert config.op_rules == {"exp": "fp32"}
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert twin == config
        assert dataclasses.asdict(twin)["op_rules"] == {"exp": "fp32"}


def test_numpys_numbers_are_taken_as_pythons_own():
    config = AmpConfig(max_grad_norm=np.float32(0.5), accumulate_steps=np.int64(2), seed=np.uint8(3), clip_value=1)
    assert [type(one) for one in (config.max_grad_norm, config.accumulate_steps, config.seed)] == [float, int, int]
    assert AmpConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        (re.compile("NORM", re.IGNORECASE), "re:(?i)NORM"),
        (re.compile("a . b", re.VERBOSE | re.DOTALL), "re:(?sx)a . b"),
        (re.compile("norm"), "re:norm"),
    ],
)
def test_a_regular_expression_keeps_its_flags(pattern, written):
    assert AmpConfig(keep_fp32=[pattern]).keep_fp32 == (written,)
    model = nn.ModuleDict({"norm": nn.Linear(1, 1), "ab": nn.Linear(1, 1)})
    by_pattern = {name for name, _ in model.named_modules() if pattern.search(name)}
    assert set(matching(model, [written])) == by_pattern


def test_a_person_may_write_the_toml():
    config = AmpConfig.from_toml(
        'precision = "bf16-mixed"\nmax_grad_norm = "none"\n[loss_scale]\ninit_scale = 8.0\nskip_limit = "none"\n'
    )
    assert (config.max_grad_norm, config.loss_scale.init_scale, config.loss_scale.skip_limit) == (None, 8.0, None)


def test_an_engine_takes_a_config_or_keywords_and_not_both():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert AmpEngine(model, optimizer, config=AmpConfig(precision="fp32", seed=3)).config.seed == 3
    with pytest.raises(AmpConfigError, match=r"^config= and precision, seed= were both given; put the latter into"):
        AmpEngine(model, optimizer, "fp32", config=AmpConfig(), seed=4)
    with pytest.raises(AmpConfigError, match=r"^unknown key 'max_norm' in the config, did you mean"):
        AmpEngine(model, optimizer, max_norm=1.0)
    with pytest.raises(AmpConfigError, match=r"^config=\{'seed': 3\} must be an AmpConfig; AmpConfig\.from_dict\(\)"):
        AmpEngine(model, optimizer, config={"seed": 3})


def test_auto_becomes_a_precision_that_the_device_offers():
    model = nn.Linear(1, 1)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), "auto")
    assert engine.config.precision in PRECISIONS


def test_every_precision_is_a_row_and_an_unknown_one_is_refused():
    assert {precision_named(name).name for name in PRECISIONS} == set(PRECISIONS)
    with pytest.raises(AmpConfigError, match=r"^precision=.fp17-x. is not a precision"):
        precision_named("fp17-x")
