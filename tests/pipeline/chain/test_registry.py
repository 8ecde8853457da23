"""Finding and loading stages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.chain.plan import plan_file
from pipeline.chain.registry import Entry, Registry
from pipeline.contracts.export import OpensText
from pipeline.errors import PluginError

RECIPE = Path(__file__).parents[3] / "recipes" / "smollm_fsdp.yaml"


def test_names_are_listed_without_importing(registry: Registry) -> None:
    sys.modules.pop("fake_stages", None)
    assert registry.names("wrap") == ["wrap.blue", "wrap.red"]
    assert "model.fake" in registry.names()
    assert "fake_stages" not in sys.modules
    stage = registry.load("wrap.red")
    assert stage.__qualname__ == "Red"
    assert registry.load("wrap.red") is stage


def test_installed_stages_are_found_once() -> None:
    names = [entry.name for entry in Registry.installed().entries()]
    assert names.count("wrap.ddp") == 1


def test_one_name_of_several_packages(fake_entry: Callable[..., Entry]) -> None:
    """The same package twice is one."""
    registry = Registry([fake_entry("wrap.red", "Red"), fake_entry("wrap.red", "Red")])
    assert len(registry.entries()) == 1
    assert registry.load("wrap.red").__qualname__ == "Red"
    two = [fake_entry("wrap.red", "Red", "one"), fake_entry("wrap.red", "Red", "two")]
    with pytest.raises(PluginError) as caught:
        Registry(two).load("wrap.red")
    assert str(caught.value) == (
        "stage `wrap.red` is registered by one 1.0 and two 1.0 (uninstall one of them)"
    )


OPENS = "that does not take what OpensText says"
UNTYPED = "parameter `thing` is not annotated with one artifact class"
FAULTS = {
    "NotAClass": "is not a dataclass",
    "RedEngine": "is not a dataclass",
    "NotFrozen": "is not a frozen dataclass",
    "Positional": "is not a keyword-only dataclass (kw_only=True)",
    "Undocumented": "has no docstring",
    "NoRun": "has no method `run` (fake_stages.NoRun)",
    "UsesUse": "has a field called `use`, which a recipe cannot set",
    "UsesTakes": "has a field called `takes`, which a recipe cannot set",
    "OpensOnInstances": f"has a `open_folder` {OPENS} (fake_stages.OpensOnInstances)",
    "OpensTrusting": f"has a `open_folder` {OPENS} (fake_stages.OpensTrusting)",
    "OpensSources": f"has a `open_source` {OPENS} (fake_stages.OpensSources)",
    "Untyped": f"fake_stages.Untyped.run: {UNTYPED}",
    "ForeseesUntyped": f"fake_stages.ForeseesUntyped.resource_needs: {UNTYPED}",
    "RehearsesUntyped": f"fake_stages.RehearsesUntyped.run_dry: {UNTYPED}",
    # no slot would take its result
    "SaysNotWhatItReturns": "fake_stages.SaysNotWhatItReturns.run: its return annotation is "
    "missing (write the class that it returns, or `-> None`)",
}


@pytest.mark.parametrize("attribute", FAULTS)
def test_what_a_class_lacks(fake_entry: Callable[..., Entry], attribute: str) -> None:
    with pytest.raises(PluginError) as caught:
        Registry([fake_entry("a.b", attribute, "plugin")]).load("a.b")
    fault, whose = FAULTS[attribute], f"stage `a.b` of plugin 1.0 (fake_stages:{attribute}) "
    assert str(caught.value) == ("" if fault.startswith("fake_stages.") else whose) + fault


def test_a_stage_that_opens_other_models(fake_entry: Callable[..., Entry]) -> None:
    assert issubclass(Registry([fake_entry("a.b", "OpensWell")]).load("a.b"), OpensText)


def test_a_module_that_is_missing() -> None:
    entry = Entry(name="a.b", value="no_such_module:X", distribution="plugin", version="2")
    with pytest.raises(PluginError) as caught:
        Registry([entry]).load("a.b")
    assert str(caught.value) == (
        "stage `a.b` of plugin 2 cannot be loaded: ModuleNotFoundError: "
        "No module named 'no_such_module' (repair or uninstall plugin)"
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("wrap.bleu", "did you mean `wrap.blue`? wrap stages: wrap.blue, wrap.red"),
        ("wrap.zzzzzzzz", "wrap stages: wrap.blue, wrap.red"),
        ("blue", "did you mean `wrap.blue`?"),
        ("zzzzzzzzzz", "`pipe stages` lists what is installed"),
    ],
)
def test_hints(fake_entry: Callable[..., Entry], name: str, hint: str) -> None:
    registry = Registry([fake_entry("wrap.red", "Red"), fake_entry("wrap.blue", "Blue")])
    assert registry.hint(name) == f"{hint}; or install its package into this environment"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("zero3", "did you mean `wrap.zero` with `stage: 3`?"),
        ("wrap.zero1", "did you mean `wrap.zero` with `stage: 1`? wrap stages: "),
        ("wrap.zero9", "did you mean `wrap.zero`? wrap stages: "),
    ],
)
def test_a_number_in_a_name_is_a_field(name: str, hint: str) -> None:
    assert Registry.installed().hint(name).startswith(hint)


def test_stages_of_one_kind_have_their_settings_in_common() -> None:
    common = Registry.installed().common_fields
    both = set(common("optimizer.adamw", "optimizer.lion"))
    assert {"lr", "schedule", "warmup_ratio", "weight_decay"} <= both
    assert common("optimizer.adamw", "wrap.ddp") == []
    assert not common("optimizer.adamw", "no.such")
    assert "context_parallel" in common("wrap.fsdp", "wrap.ddp")
    assert "tensor_parallel" not in common("wrap.fsdp", "wrap.ddp")  # which ddp does not have
    assert "takes" in common("wrap.fsdp", "wrap.ddp")
    assert "takes" not in common("train.causal_lm", "train.hf_trainer")  # which take other things


@pytest.mark.parametrize("use", ["optimizer.lion", "optimizer.adamw"])
def test_the_rate_of_the_file_stays(use: str) -> None:
    before = plan_file(RECIPE, forecast=True)
    plan = plan_file(RECIPE, [f"optimizer.use={use}"], forecast=True)
    old, new = (
        next(step.stage for step in made.slots if step.slot == "optimizer")
        for made in (before, plan)
    )
    assert (new.lr, new.schedule, new.warmup_ratio) == (old.lr, old.schedule, old.warmup_ratio)
    notes = [str(warning) for warning in plan.warnings if "became" in str(warning)]
    assert len(notes) == (use == "optimizer.lion")
    assert all("optimizer.adamw became optimizer.lion: kept lr, " in text for text in notes)
    assert "lr: " in plan.recipe.dump()  # which the ranks read
