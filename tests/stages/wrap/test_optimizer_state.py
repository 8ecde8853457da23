"""Optimizers of a plan's parts, and their state: it is the state that their stages declare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline import DistContext, OptimizerPart, OptimizerPlan, StageError, testing
from pipeline.contracts.engine import Engine
from stages.optimizer.adamw import AdamW
from stages.wrap.optimizer_state import make_optimizers
from tests.stages.wrap.test_torch_engine import Plain
from tests.support.batches import accumulated, micro_batch
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.state import Setting, make_engine


class Rule(torch.optim.SGD):
    """A rule that does something with each parameter's state in a step, the number `steps`."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self.change(group, parameter, self.state[parameter])

    def change(self, group: Any, parameter: Any, state: Any) -> None:
        raise NotImplementedError


def rule(name: str, change: Any) -> type[torch.optim.Optimizer]:
    """Return a rule that calls `change` with a group, a parameter and its state."""
    return type(name, (Rule,), {"change": lambda self, *given: change(*given)})


# A mistake that has nothing to do with parameters' state.
Scheduled = rule("Scheduled", lambda group, one, state: group["schedule"])
# A number that is no tensor, and one under the name of torch's count of updates.
Counting = rule("Counting", lambda group, one, state: state.update(seen=state.get("seen", 0) + 1))
Stepping = rule("Stepping", lambda group, one, state: state.update(step=state.get("step", 0) + 1))
# A new tensor after each update, not the old one with new values.
Rebinding = rule("Rebinding", lambda group, one, state: state.update(average=state["average"] + 1))
# A number in each group, as schedule-free rules keep.
InGroups = rule("InGroups", lambda group, one, state: group.update(k=group.get("k", 0) + 1))
# A moment of another shape than the parameter.
Factored = rule(
    "Factored",
    lambda group, one, state: state.update(average=one.grad.square().mean(-1, keepdim=True)),
)


class Replacing(Rule):
    """A rule that makes a new mapping in each step."""

    def change(self, group: Any, parameter: Any, state: Any) -> None:
        self.state[parameter] = {"average": state["average"] + 1}


class Later(Rule):
    """A rule that keeps something from its second step on."""

    def change(self, group: Any, parameter: Any, state: Any) -> None:
        if self.steps > 1:
            state["late"] = torch.ones_like(parameter)


class Nowhere(Rule):
    """A rule that keeps a number next to the parameters' state."""

    def step(self, closure: Any = None) -> None:
        self.state["count"] = 1


class Copying(Rule):
    """A rule whose moment begins as the weight."""

    def change(self, group: Any, parameter: Any, state: Any) -> None:
        if "average" not in state:
            state["average"] = parameter.detach().clone()
        parameter.data.copy_(state["average"].add_(parameter.grad, alpha=-0.1))


def plan_of(
    rule: type[torch.optim.Optimizer], moments: tuple[str, ...], **settings: Any
) -> OptimizerPlan:
    settings = {"lr": 0.1, **settings}
    part = OptimizerPart(
        algorithm=rule.__name__.lower(), hyperparameters=settings, moments=moments,
        counts_updates=rule is torch.optim.Rprop,
        groups=lambda named: [{"params": [one.parameter for one in named]}],
        build=lambda groups: rule(groups, **settings), lr_scale=lambda step, total: 1.0,
    )  # fmt: skip
    return OptimizerPlan(parts=[part], max_grad_norm=None)


def kinds(engine: Engine) -> dict[str, float]:
    """Return the kinds of state of an engine, each with a fragment's largest value."""
    engine.state()
    states = [fragment.state.items() for fragment in engine.fragments()]
    return {kind: values.max().item() for state in states for kind, values in state}


WRONG: dict[type[torch.optim.Optimizer], tuple[tuple[str, ...], str]] = {
    Later: ((), r"Later keeps \['late'\] for a parameter, its stage declares \[\]"),
    InGroups: ((), r"InGroups keeps \['k'\] in a group of parameters; such state cannot be"),
    Nowhere: ((), "Nowhere keeps 'count' next to the state of parameters; such state cannot be"),
    Factored: (("average",), r"Factored keeps 'average' of shape \(\d+, 1\) for a parameter of"),
    Copying: (("average",), "copying does not begin with moments of zeros"),
    torch.optim.Rprop: (("prev", "step_size"), "rprop does not begin with moments of zeros"),
    # A resume would begin it again.
    Counting: ((), r"keeps \['seen'\] for a parameter, its stage declares \[\]; such"),
    Stepping: ((), r"keeps \['step'\] for a parameter, its stage declares \[\]; such"),
    torch.optim.RMSprop: (
        ("square_avg",),
        r"RMSprop looks for 'step' in a parameter's state, and its stage declares moments "
        r"\['square_avg'\] and counts_updates=False \(declare every key",
    ),
}


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_state_that_no_checkpoint_could_hold_ends_the_run(
    rule: type[torch.optim.Optimizer],
) -> None:
    moments, wanted = WRONG[rule]
    with pytest.raises(StageError, match=wanted):  # noqa: PT012
        engine = Plain(plan_of(rule, moments))
        assert list(engine.fragments())  # as a checkpoint's manager does before the first step
        engine.train(2)


def test_a_key_that_is_missing_elsewhere_is_not_said_to_be_of_the_state() -> None:
    engine = Plain(plan_of(Scheduled, ()))
    assert list(engine.fragments())
    with pytest.raises(KeyError, match="'schedule'"):
        engine.train(1)


WRAPS = ("ddp", "fsdp full", "zero1", "zero3")


def stepped(dist: DistContext, folder: str) -> list[Any]:
    """Return the kinds of declared state after two steps, some of which a step puts in place of
    what was there, and what is said of undeclared state after one."""
    tokens, found = torch.arange(12).view(2, 6), list[Any]()
    momentum = plan_of(torch.optim.SGD, ("momentum_buffer",), momentum=0.9)
    rebound, replaced = (plan_of(rule, ("average",)) for rule in (Rebinding, Replacing))
    declared = [(wrap, plan) for wrap in ("ddp", "zero1") for plan in (rebound, replaced)]
    for wrap, plan in (("ddp", momentum), *declared):
        engine = make_engine(context(dist, folder), Setting(wrap=wrap), plan)
        assert list(engine.fragments())
        for _ in range(2):
            accumulated(engine, [micro_batch(tokens, tokens)], 1)
            engine.step(lr_scales=[1.0])
        found.append(kinds(engine))
        engine.close()
    for wrap in WRAPS:
        plan = plan_of(torch.optim.SGD, (), momentum=0.9)
        engine = make_engine(context(dist, folder), Setting(wrap=wrap), plan)
        assert list(engine.fragments())
        accumulated(engine, [micro_batch(tokens, tokens)], 1)
        with pytest.raises(StageError) as error:
            engine.step(lr_scales=[1.0])
        found.append(str(error.value))
        engine.close()
    return found


def test_a_step_keeps_the_state_that_is_declared(tmp_path: Path) -> None:
    momentum, *found = run_ranks(stepped, 1, str(tmp_path))[0]
    assert sorted(momentum) == ["momentum_buffer", "weight"]
    assert [one["average"] for one in found[:4]] == [2.0] * 4
    for said in found[4:]:
        keeps = "SGD keeps ['momentum_buffer'] for a parameter, its stage declares []; such"
        assert keeps in said
    assert len(found) == 4 + len(WRAPS)


def test_a_frozen_model_has_no_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(StageError, match="every parameter of the model is frozen"):
        make_optimizers(AdamW().run(testing.context(tmp_path)), model)
    assert make_optimizers(OptimizerPlan(parts=[], max_grad_norm=None), model) == []
