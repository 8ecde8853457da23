"""An optimizer of two rules, one for whole matrices, in tests/plugins/tworules: the same numbers
under every layout, and checkpoints that hold for each weight what its rule keeps."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import yaml

from pipeline import (
    Context,
    DistContext,
    EngineState,
    NamedParameter,
    OptimizerPart,
    OptimizerPlan,
    StageError,
)
from pipeline.checkpoint import Reading, open_state
from pipeline.checkpoint.restore import require_same_model
from pipeline.contracts.metrics import records
from pipeline.errors import ResumeRefused
from stages.formats.formats import Canonical, Dcp
from stages.formats.stored import weights_of
from stages.hf.trainer import HfTrainer
from stages.precision.policy import PrecisionPolicy
from tests.parity.body import BATCH, SEED, STEPS, Case, tiny_source, train_case
from tests.parity.reference import steps_of
from tests.plugins.tworules.tworules import TwoRules
from tests.stages.checkpoint.test_layouts import saved
from tests.support.batches import accumulated, micro_batch
from tests.support.layouts import ALL_LAYOUTS, LAST, continued, undisturbed
from tests.support.pipe import Pipe
from tests.support.plugins import install
from tests.support.processes import RankFailed, run_ranks
from tests.support.runs import context, toy_data
from tests.support.state import Setting, make_engine
from tests.support.strategies import STRATEGIES
from tests.support.tier import FULL
from tests.support.tiny_project import tiny_project

STAGE = TwoRules(lr=1e-3, matrix_lr=2e-3, weight_decay=0.1, max_grad_norm=0.5)
CHAIN = ["ddp", "tensor x fsdp" if FULL else "tensor", "pipeline"]
"""Layouts each of which continues from the others."""
LAYOUTS = ["one", "fsdp on 3", "expert x fsdp", *CHAIN]
if FULL:
    LAYOUTS = [name for name in ALL_LAYOUTS if "zero" not in name]
Trained = dict[str, tuple[Path, list[float]]]


def trainings(dist: DistContext, root: str, names: list[str]) -> list[list[float]]:
    """Train under one layout after another; return the losses of the second halves."""
    return [undisturbed(dist, f"{root}/{name}", name, "whole", STAGE) for name in names]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the folder of a training under each layout, and the losses of its second half."""
    root, found = tmp_path_factory.mktemp("tworules"), {}
    for ranks in {ALL_LAYOUTS[name].ranks for name in LAYOUTS}:
        names = [name for name in LAYOUTS if ALL_LAYOUTS[name].ranks == ranks]
        losses = run_ranks(trainings, ranks, str(root), names, limit=600)[0]
        found |= {name: (root / name, own) for name, own in zip(names, losses, strict=True)}
    return found


def test_every_layout_trains_the_same_numbers(trained: Trained) -> None:
    folder, losses = trained["one"]
    expected = saved(folder)
    for name, (other, found) in trained.items():
        assert found == pytest.approx(losses, rel=1e-6), name
        tensors = saved(other)
        assert tensors.keys() == expected.keys(), name
        for key, tensor in tensors.items():
            torch.testing.assert_close(
                tensor, expected[key], rtol=0, atol=1e-5, msg=f"{key} under {name}"
            )


def test_a_checkpoint_holds_what_each_rule_keeps(trained: Trained) -> None:
    for folder, _ in trained.values():
        state = open_state(str(folder / "checkpoints" / f"step-{LAST:08d}"), Reading())
        kept = state.state.moments()
        matrices = {name for name, kinds in kept.items() if kinds == ("momentum_buffer",)}
        assert {len(state.tensors[f"weight/{name}"].shape) for name in matrices} == {2, 3}
        assert all(".layers." in name for name in matrices)
        rest = kept.keys() - matrices
        assert {kept[name] for name in rest} == {("exp_avg", "exp_avg_sq")}
        assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= rest
        kinds = {
            name: {
                kind
                for kind, _, other in (key.partition("/") for key in state.tensors)
                if other == name and kind not in ("weight", "ema")
            }
            for name in weights_of(state)
        }
        assert kinds == {name: set(kept[name]) for name in kinds}
        assert state.state.updates == dict.fromkeys(kept, LAST)
        rates = {group.settings["lr"]: group.moments for group in state.state.groups}
        assert rates == {1e-3: ["exp_avg", "exp_avg_sq"], 2e-3: ["momentum_buffer"]}
        state.close()


def test_a_resume_is_exact_and_layouts_continue_each_other(trained: Trained) -> None:
    root = trained["ddp"][0].parent
    for name in CHAIN:
        ranks = ALL_LAYOUTS[name].ranks
        found = run_ranks(continued, ranks, str(root), name, CHAIN, "whole", STAGE, limit=600)[0]
        for source, losses in zip(CHAIN, found, strict=True):
            folder, expected = trained[source]
            tensors, whole = saved(root / f"{source} to {name}"), saved(folder)
            if source == name:
                assert losses == expected, name
                assert all(torch.equal(tensor, whole[key]) for key, tensor in tensors.items())
            assert losses == pytest.approx(expected, rel=1e-6), (source, name)
            for key, tensor in tensors.items():
                torch.testing.assert_close(
                    tensor, whole[key], rtol=0, atol=1e-5, msg=f"{key}: {source} to {name}"
                )


def test_the_own_format_is_converted_and_others_hold_adams_moments_only(
    trained: Trained, tmp_path: Path
) -> None:
    state = open_state(str(trained["ddp"][0] / "checkpoints" / f"step-{LAST:08d}"), Reading())
    message = "only weights and Adam's moments can be written; here is exp_avg, exp_avg_sq, moment"
    with pytest.raises(Exception, match=re.escape(message)):
        Dcp().write(state, tmp_path / "out")
    Canonical().write(state, tmp_path / f"step-{LAST:08d}")
    written = Canonical().open(tmp_path / f"step-{LAST:08d}", Reading())
    assert written.state == replace(state.state, shapes={})
    assert written.tensors.keys() == state.tensors.keys()
    state.close()
    written.close()


def part(
    name: str, takes: Any, moments: tuple[str, ...], rule: Any, **settings: Any
) -> OptimizerPart:
    return OptimizerPart(
        name=name, takes=takes, algorithm=name, hyperparameters={"lr": 0.1, **settings},
        moments=moments, counts_updates=name == "adamw",
        groups=lambda named: [{"params": [one.parameter for one in named]}],
        build=lambda groups: rule(groups, lr=0.1, **settings), lr_scale=lambda step, total: 1.0,
    )  # fmt: skip


def first_step(dist: DistContext, folder: str, wrap: str) -> None:
    """Take a step of SGD with a momentum that is not declared for matrices, AdamW for the rest."""
    matrices = part("sgd", lambda one: len(one.shape) == 2, (), torch.optim.SGD, momentum=0.9)
    rest = part("adamw", lambda one: True, ("exp_avg", "exp_avg_sq"), torch.optim.AdamW)
    plan = OptimizerPlan(parts=[matrices, rest], max_grad_norm=1.0)
    engine = make_engine(context(dist, folder), Setting(wrap=wrap), plan)
    tokens = torch.arange(12).view(2, 6)
    accumulated(engine, [micro_batch(tokens, tokens)], 1)
    engine.step(lr_scales=[1.0, 1.0])


@pytest.mark.parametrize("wrap", ["ddp", "fsdp full"])
def test_state_that_one_part_does_not_declare_ends_the_first_step(
    wrap: str, tmp_path: Path
) -> None:
    wanted = r"in step\n[\s\S]*SGD keeps \['momentum_buffer'\] for a parameter, its stage declares"
    with pytest.raises(RankFailed, match=wanted):
        run_ranks(first_step, 1, str(tmp_path), wrap)


def under_zero(dist: DistContext, folder: str, wrap: str) -> None:
    make_engine(context(dist, folder), Setting(wrap=wrap, optimizer=STAGE))


@pytest.mark.usefixtures("deepspeed_operators")
def test_zero_refuses_a_plan_that_no_stage_has_declared(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rule orthogonal needs whole matrices, and DeepSpeed"):
        run_ranks(under_zero, 1, str(tmp_path), "zero2")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Pipe:
    folder = tmp_path_factory.mktemp("project")
    (folder / "plugin").mkdir()
    source = "from tests.plugins.tworules.tworules import TwoRules\n"
    source += "from tests.plugins.tworules.tworules_planner import TwoRulesPlanner\n"
    install(
        folder / "plugin", "tworules", "two_rules", source, {"optimizer.tworules": "TwoRules"},
        {"optimizer.tworules": "TwoRulesPlanner"},
    )  # fmt: skip
    tiny_project(folder)
    recipe = yaml.safe_load((folder / "tiny.yaml").read_text())
    recipe["stages"]["optimizer"] = {"use": "optimizer.tworules", "lr": 0.01}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return Pipe(folder / "plugin", folder)


def test_a_run_of_two_rules_reports_both_rates(project: Pipe) -> None:
    options = ["train.generate=null", "--run-dir", "run", "--until", "train"]
    done = project("run", "tiny.yaml", *options)
    assert done.code == 0, done.stderr
    steps = [one for one in records(project.folder / "run/metrics.jsonl") if "grad_norm" in one]
    assert {one["lr"] for one in steps} == {0.02}
    rest = [one["lr/rest"] for one in steps]
    assert rest[0] == 0.01
    assert rest == sorted(rest, reverse=True)
    assert rest[-1] < 0.001


def test_a_plan_counts_the_moments_of_both_rules(project: Pipe) -> None:
    done = project("plan", "--json", "tiny.yaml", "wrap.use=wrap.ddp", "launch.procs=1")
    record = json.loads(done.stdout)
    state = open_state(str(max((project.folder / "run/checkpoints").iterdir())), Reading())
    kept = dict.fromkeys(state.state.kinds(), 0)
    for key, entry in state.tensors.items():
        if key.partition("/")[0] in kept:
            kept[key.partition("/")[0]] += entry.nbytes
    assert set(kept) == {"momentum_buffer", "exp_avg", "exp_avg_sq"}
    predicted = record["host"]["optimizer step"]["items"]["optimizer state"]
    assert predicted == sum(kept.values())
    assert record["caveats"] == ["the exchange and the arithmetic of whole matrices"]


def refusals(project: Pipe, *arguments: str) -> str:
    done = project("check", *arguments)
    assert done.code == 2, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_check_refuses_what_cannot_be_right(project: Pipe) -> None:
    recipe = {"extends": "./tiny.yaml", "stages": {"wrap": {"use": "wrap.zero", "stage": 2}}}
    (project.folder / "zero.yaml").write_text(yaml.safe_dump(recipe))
    assert refusals(project, "zero.yaml").strip() == (
        "zero.yaml:4:12: wrap.stage: the optimizer slot's rule orthogonal needs whole matrices, "
        "and DeepSpeed divides all parameters together, as one flat tensor (use wrap.fsdp, or "
        "another optimizer)"
    )
    without = ["wrap=null", "checkpoint=null", "consolidate=null", "export=null"]
    hf = ["train={use: train.hf_trainer, steps: 2, global_batch_size: 4, micro_batch_size: 1}"]
    text = refusals(project, "tiny.yaml", *without, *hf)
    assert "the Trainer takes one optimizer, the optimizer slot asks for orthogonal, adamw" in text


def test_a_parameter_that_no_part_takes_is_named() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    (only,) = replace(STAGE, lr=0.1).run(None).parts[:1]  # type: ignore[arg-type]
    plan = OptimizerPlan(parts=[only], max_grad_norm=None)
    with pytest.raises(StageError, match="no part of the optimizer takes the trained parameter a"):
        plan.divide([NamedParameter("a.weight", weight, (2, 2), kind=torch.nn.Embedding)])
    weight.requires_grad_(False)
    named = NamedParameter("a.weight", weight, (2, 2), kind=torch.nn.Embedding)
    assert plan.divide([named]) == [[]]


def test_parts_need_names() -> None:
    (first, second) = STAGE.run(None).parts  # type: ignore[arg-type]
    with pytest.raises(StageError, match="need different names"):
        OptimizerPlan(parts=[first, replace(second, name="matrices")], max_grad_norm=None)


def states() -> Iterator[EngineState]:
    from pipeline import ParameterGroup

    for moments in (("a",), ("b",)):
        yield EngineState(
            shapes={"x": (1,), "y": (1,)}, aliases={}, frozen=[], loss_scale=None,
            groups=[
                ParameterGroup(settings={}, parameters=["x"], moments=moments),
                ParameterGroup(settings={}, parameters=["y"], moments=("a",)),
            ],
            updates={"x": 1, "y": 1},
        )  # fmt: skip


def test_a_checkpoint_of_other_kinds_names_the_parameters() -> None:
    before, now = states()
    require_same_model(before, before, "here")
    with pytest.raises(ResumeRefused, match="the optimizer kept a for x, this one keeps b"):
        require_same_model(before, now, "here")


def numbers(dist: DistContext, folder: str, wrap: str, stage: Any) -> list[float]:
    """Return the losses of a training under a strategy, or with transformers' Trainer."""
    if wrap != "trainer":
        one = STRATEGIES[wrap]
        case = Case(wrap=one.use, fields=one.fields, optimizer=stage)
        return steps_of(train_case(dist, folder, case), "loss")
    ctx = context(dist, folder, SEED)
    precision = PrecisionPolicy(compute="fp32").run(ctx)
    trainer = HfTrainer(global_batch_size=BATCH, steps=STEPS, micro_batch_size=2)
    trainer.run(ctx, toy_data(), stage.run(ctx), precision, tiny_source(ctx))
    return steps_of({"records": records(Path(folder) / "metrics.jsonl")}, "loss")


class OneRule(TwoRules):
    """Orthogonalised momentum for every parameter; vectors are divided by their norm."""

    def run(self, ctx: Context) -> OptimizerPlan:
        matrices, _ = super().run(ctx).parts
        return self.plan_of(replace(matrices, takes=lambda parameter: True))


@pytest.mark.parametrize("name", ["accelerate ddp", "accelerate fsdp2", "trainer"])
def test_libraries_that_wrap_the_model_train_the_same_numbers(name: str) -> None:
    """The model's head is its embedding."""
    stage = STAGE if name != "trainer" else OneRule(lr=1e-3, matrix_lr=2e-3, max_grad_norm=0.5)
    expected, losses = losses_of("ddp", stage), losses_of(name, stage)
    assert len(expected) == STEPS
    assert losses == pytest.approx(expected, rel=1e-6)


@functools.cache
def losses_of(wrap: str, stage: Any) -> list[float]:
    with TemporaryDirectory() as folder:
        found: list[float] = run_ranks(numbers, 2, folder, wrap, stage)[0]
    return found
