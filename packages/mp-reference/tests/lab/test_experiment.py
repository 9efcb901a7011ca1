"""Experiment files: everything that cannot be run is refused before anything runs, with the way out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_reference.lab.experiment import Cell, DotProducts, ExperimentError, Task, load, shipped
from mp_reference.lab.policies import Policy, PolicyError, accumulator_of, format_of_name, loss_scale_of
from mp_reference.spec.formats import BF16, FP16

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """
name = "tiny"
question = "Does it run?"
seeds = [0, 1]
[task]
data = "spirals"
steps = 2
width = 4
lr = 1
[policy]
format = "bf16"
[grid]
loss_scale = ["off", "static:8"]
rounding = ["nearest-even", "toward-zero"]
[[also]]
format = "fp32"
overrides = { exp = "none", "softmax.int" = "fp32" }
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "experiment.toml"
    path.write_text(text)
    return path


def test_the_grid_is_the_product_of_its_lists_and_the_rows_of_also_come_after(tmp_path: Path) -> None:
    experiment = load(written(tmp_path, GOOD))
    assert len(experiment.cells) == (2 * 2 + 1) * 2
    assert experiment.policies[0] == Policy(format="bf16")
    assert experiment.policies[3] == Policy(format="bf16", loss_scale="static:8", rounding="toward-zero")
    assert experiment.policies[4] == Policy(format="fp32", overrides="exp=none softmax.int=fp32")
    assert experiment.work == Task(data="spirals", steps=2, width=4, lr=1)


def test_a_cell_s_key_depends_on_everything_that_decides_its_result() -> None:
    task = Task(steps=2)
    cells = [
        Cell(Policy(), 0, task), Cell(Policy(), 1, task), Cell(Policy(format="fp16"), 0, task),
        Cell(Policy(), 0, Task(steps=3)), Cell(Policy(), 0, DotProducts()),
    ]  # fmt: skip
    assert len({cell.key for cell in cells}) == len(cells)
    assert Cell(Policy(), 0, Task(steps=2)).key == cells[0].key


@pytest.mark.parametrize("name", ["loss-scaling", "masters", "accumulator-width"])
def test_every_shipped_experiment_loads_and_names_its_source(name: str) -> None:
    experiment = load(name)
    assert experiment.name == name
    assert experiment.question.endswith("?")
    assert re.search(r"arXiv|SIAM", experiment.source)
    assert set(shipped()) == {"loss-scaling", "masters", "accumulator-width"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[task]", "[tasks]"), r"unknown key 'tasks'; did you mean 'task'\? Known: name, question"),
        (("width", "with"), r"\[task\]: unknown key 'with'; did you mean 'width'\? Known: data, steps"),
        (("loss_scale", "los_scale"), r"\[grid\]: unknown key 'los_scale'; did you mean 'loss_scale'\?"),
        (("format = \"bf16\"", "fromat = \"bf16\""), r"\[policy\]: unknown key 'fromat'; did you mean 'format'\?"),
        (("format = \"fp32\"", "sed = 3"), r"\[\[also\]\]: unknown key 'sed'"),
        (("name = \"tiny\"", ""), r"needs name, question, and either \[task\] or \[dot_products\]"),
        (("[task]", "[dot_products]\n[task]"), r"either \[task\] or \[dot_products\]"),
        (("seeds = [0, 1]", "seeds = []"), r"seeds=\[\] must be a list of whole numbers, such as \[0, 1, 2\]"),
        (("seeds = [0, 1]", "seeds = 3"), "seeds=3 must be a list of whole numbers"),
        (("steps = 2", "steps = 2.5"), r"\[task\]: steps=2\.5 must be of type int"),
        (("steps = 2", "steps = true"), r"\[task\]: steps=True must be of type int"),
        (("steps = 2", "steps = 0"), "steps=0 must be above 0"),
        (("\"spirals\"", "\"mnist\""), "data='mnist' must be one of text, stripes, spirals"),
        (("\"static:8\"]", "\"static:0\"]"), r"policy \{'loss_scale': 'static:0'.*init_scale=0\.0 must be finite"),
        (("[\"off\", \"static:8\"]", "\"off\""), r"\[grid\]: loss_scale='off' must be a list of the values to try"),
        (("toward-zero", "nearest-even"), r"a policy comes twice; \[grid\] and \[\[also\]\] must not repeat"),
        (("format = \"bf16\"", "format = 16"), "policy .*expected string"),
        (("= \"Does", "= Does"), "is no TOML"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_run_is_refused_with_the_nearest_known_words(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    assert change[0] in GOOD
    with pytest.raises(ExperimentError, match=message):
        load(written(tmp_path, GOOD.replace(*change)))


def test_a_grid_without_cells_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ExperimentError, match=r"has no cells; add a \[grid\] with lists of values, or \[\[also\]\] rows"
    ):
        load(written(tmp_path, "name = 'a'\nquestion = 'b?'\n[task]\nsteps = 1"))
    with pytest.raises(
        ExperimentError, match="No such file or directory; give a TOML file or one of the shipped accum"
    ):
        load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("lengths", ["[]", "[4, 0]"])
def test_dot_products_need_lengths(tmp_path: Path, lengths: str) -> None:
    text = f"name = 'a'\nquestion = 'b?'\n[dot_products]\nlengths = {lengths}\n[grid]\nformat = ['fp16']"
    with pytest.raises(ExperimentError, match=r"lengths=.* must be above 0"):
        load(written(tmp_path, text))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"format": "fp12"}, "format 'fp12' is not one of fp32, tf32, fp16.* nor of the form 'e5m4'"),
        ({"format": "e8m23x"}, "format 'e8m23x'"),
        ({"format": "e5m40"}, "mantissa_bits=40 must lie in"),
        ({"storage": "half"}, "storage='half' must be 'fp32' or 'same'"),
        ({"masters": "kahan"}, "masters='kahan' must be one of .*all but fp32 need storage='same'"),
        ({"masters": "some", "storage": "same"}, "masters='some' must be one of fp32, none, stochastic, kahan"),
        ({"rounding": "up"}, "rounding='up' must be one of nearest-even"),
        ({"device": "tpu"}, "device='tpu' must be one of cuda, cpu"),
        ({"format": "fp16", "overrides": {"exp": "fp64"}}, "overrides: exp=fp64 must end in one of lower_precision_fp"),
        ({"loss_scale": "static"}, r"loss_scale='static' must be 'off', 'static:SCALE' or 'PRESET\[:START"),
        ({"loss_scale": "torch:many"}, "loss_scale='torch:many': could not convert string to float"),
        ({"loss_scale": "torch:1:2:3"}, "loss_scale='torch:1:2:3' must be"),
        ({"loss_scale": "off:1"}, "loss_scale='off:1' must be"),
        ({"accumulator": "pentium"}, "accumulator='pentium' must be 'fp32', 'exact', a format"),
        ({"accumulator": "sequential:"}, "accumulator='sequential:' must be"),
    ],
)  # fmt: skip
def test_a_policy_that_means_nothing_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.of(**words)


def test_words_stand_for_the_objects_they_name() -> None:
    random = np.random.default_rng(0)
    mixed = Policy(format="e5m4", accumulator="hopper", overrides="exp=none").precision(random)
    assert mixed.rules is not None
    assert (mixed.storage.name, mixed.rules.fmt.name, mixed.rules.rule("exp")) == ("fp32", "e5m4", None)
    same = Policy(format="bf16", storage="same", masters="stochastic", rounding="stochastic").precision(random)
    assert (same.storage, same.rules, same.master_weights, same.write_back) == (BF16, None, "none", "stochastic")
    assert same.arithmetic.random is random
    assert accumulator_of("fp16").name == "sequential(fp16)"
    assert accumulator_of("pairwise:fp32").name == "pairwise(fp32, 1)"
    assert accumulator_of("exact").name == "exact"
    assert loss_scale_of("off").initial().scale == 1.0
    assert loss_scale_of("static:0.5").dynamic is False
    assert loss_scale_of("deepspeed").init_scale == 65536.0
    assert format_of_name("fp16") == FP16


def test_a_label_says_what_differs_from_plain_training() -> None:
    assert Policy().label == "fp32"
    assert Policy(format="bf16", storage="same").label == "bf16, masters"
    assert Policy(format="bf16", storage="same", masters="none").label == "bf16, no masters"
    words = {"loss_scale": "static:8", "accumulator": "exact", "rounding": "to-odd", "overrides": "exp=none"}
    assert Policy(format="fp16", **words).label == "fp16, static:8, exact, to-odd, exp=none"
