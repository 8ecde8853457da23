"""The state that an optimizer keeps is the state that its stage declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import DistContext, OptimizerPart, OptimizerPlan
from tests.support.batches import accumulated, micro_batch
from tests.support.processes import RankFailed, run_ranks
from tests.support.runs import context
from tests.support.state import Setting, make_engine


class Scheduled(torch.optim.SGD):
    """A rule with a mistake that has nothing to do with parameters' state."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["schedule"]


class Counting(torch.optim.SGD):
    """A rule that keeps a number that is no tensor."""

    key = "seen"

    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state[self.key] = state.get(self.key, 0) + 1


class Stepping(Counting):
    """A rule that counts updates as torch's do."""

    key = "step"


class Rebinding(torch.optim.SGD):
    """A rule that keeps a new tensor after each update, not the old one with new values."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["average"] = state["average"] + 1


class Replacing(torch.optim.SGD):
    """A rule that makes a new mapping in each step."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"average": self.state[parameter]["average"] + 1}


class Later(torch.optim.SGD):
    """A rule that keeps something from its second step on."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for parameter in self.param_groups[0]["params"] if self.steps > 1 else ():
            self.state[parameter]["late"] = torch.ones_like(parameter)


class InGroups(torch.optim.SGD):
    """A rule that keeps a number in each group, as schedule-free ones do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Nowhere(torch.optim.SGD):
    """A rule that keeps a number next to the parameters' state."""

    def step(self, closure: Any = None) -> None:
        self.state["count"] = 1


class Factored(torch.optim.SGD):
    """A rule whose moment is of another shape than the parameter."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["average"] = parameter.grad.square().mean(-1, keepdim=True)


class Copying(torch.optim.SGD):
    """A rule whose moment begins as the weight."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "average" not in state:
                state["average"] = parameter.detach().clone()
            parameter.data.copy_(state["average"].add_(parameter.grad, alpha=-0.1))


RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1}),
    "scheduled": (Scheduled, {"lr": 0.1}),
    "counting": (Counting, {"lr": 0.1}),
    "stepping": (Stepping, {"lr": 0.1}),
    "rebinding": (Rebinding, {"lr": 0.1}),
    "replacing": (Replacing, {"lr": 0.1}),
    "later": (Later, {"lr": 0.1}),
    "in groups": (InGroups, {"lr": 0.1}),
    "nowhere": (Nowhere, {"lr": 0.1}),
    "factored": (Factored, {"lr": 0.1}),
    "copying": (Copying, {"lr": 0.1}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
}


def stepped(
    dist: DistContext, folder: str, wrap: str, moments: tuple[str, ...], algorithm: str = "sgd"
) -> dict[str, float]:
    """Take two steps of SGD with momentum, whose buffers torch makes in the first one, or of
    another rule; return the kinds of state of a fragment, each with its largest value."""
    rule, settings = RULES[algorithm]
    part = OptimizerPart(
        algorithm=algorithm, hyperparameters=settings, moments=moments,
        counts_updates=algorithm == "rprop",
        groups=lambda named: [{"params": [one.parameter for one in named]}],
        build=lambda groups: rule(groups, **settings), lr_scale=lambda step, total: 1.0,
    )  # fmt: skip
    plan = OptimizerPlan(parts=[part], max_grad_norm=None)
    engine = make_engine(context(dist, folder), Setting(wrap=wrap), plan)
    assert list(engine.fragments())  # as a checkpoint's manager does before the first step
    tokens = torch.arange(12).view(2, 6)
    for _ in range(2):
        accumulated(engine, [micro_batch(tokens, tokens)], 1)
        engine.step(lr_scales=[1.0])
    engine.state()
    found = {
        kind: values.max().item()
        for fragment in engine.fragments()
        for kind, values in fragment.state.items()
    }
    engine.close()
    return dict(sorted(found.items()))


def test_state_that_is_declared_is_saved(tmp_path: Path) -> None:
    found = run_ranks(stepped, 1, str(tmp_path), "ddp", ("momentum_buffer",))[0]
    assert list(found) == ["momentum_buffer", "weight"]


@pytest.mark.parametrize("rule", ["rebinding", "replacing"])
@pytest.mark.parametrize("wrap", ["ddp", "zero1"])
def test_state_that_a_step_puts_in_place_of_the_declared_is_saved(
    wrap: str, rule: str, tmp_path: Path
) -> None:
    found = run_ranks(stepped, 1, str(tmp_path), wrap, ("average",), rule)[0]
    assert found["average"] == 2.0


WRONG = {
    "later": ((), r"Later keeps \['late'\] for a parameter, its stage declares \[\]"),
    "in groups": ((), r"InGroups keeps \['k'\] in a group of parameters; such state cannot be"),
    "nowhere": ((), "Nowhere keeps 'count' next to the state of parameters; such state cannot be"),
    "factored": (("average",), r"Factored keeps 'average' of shape \(\d+, 1\) for a parameter of"),
    "copying": (("average",), "copying does not begin with moments of zeros"),
    "rprop": (("prev", "step_size"), "rprop does not begin with moments of zeros"),
}


@pytest.mark.parametrize("rule", WRONG)
def test_state_that_no_checkpoint_could_hold_ends_the_run(rule: str, tmp_path: Path) -> None:
    moments, wanted = WRONG[rule]
    with pytest.raises(RankFailed, match=wanted):
        run_ranks(stepped, 1, str(tmp_path), "ddp", moments, rule)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp full", "zero1", "zero3"])
def test_state_that_a_step_adds_undeclared_ends_the_run(wrap: str, tmp_path: Path) -> None:
    """No checkpoint would hold it, and a resumed run would differ without a word."""
    wanted = r"in step\n[\s\S]*SGD keeps \['momentum_buffer'\] for a parameter, "
    wanted += r"its stage declares \[\]; such"
    with pytest.raises(RankFailed, match=wanted):
        run_ranks(stepped, 1, str(tmp_path), wrap, ())


@pytest.mark.parametrize(("rule", "key"), [("counting", "seen"), ("stepping", "step")])
def test_state_that_is_no_tensor_ends_the_run_too(rule: str, key: str, tmp_path: Path) -> None:
    """A resume would begin it again."""
    wanted = rf"keeps \['{key}'\] for a parameter, its stage declares \[\]; such"
    with pytest.raises(RankFailed, match=wanted):
        run_ranks(stepped, 1, str(tmp_path), "ddp", (), rule)


def test_state_that_a_step_looks_for_undeclared_is_named(tmp_path: Path) -> None:
    wanted = r"RMSprop looks for 'step' in a parameter's state, and its stage declares moments "
    wanted += r"\['square_avg'\] and counts_updates=False \(declare every key"
    with pytest.raises(RankFailed, match=wanted):
        run_ranks(stepped, 1, str(tmp_path), "ddp", ("square_avg",), "rmsprop")


def test_a_key_that_is_missing_elsewhere_is_not_said_to_be_of_the_state(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="KeyError: 'schedule'"):
        run_ranks(stepped, 1, str(tmp_path), "ddp", (), "scheduled")
