"""Merging of files and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import RecipeError
from pipeline.recipe import Recipe, SlotSpec, load_recipe, read_recipe

BASE = """\
name: base
seed: 1
launch: {procs: 2, device: cpu}
env: [A, B]
stages:
  model: {use: model.x, size: 1, nested: {a: 1, b: [1, 2]}}
  wrap: {use: wrap.x, stage: 2, extra: {k: 1}}
  train: {use: train.x, steps: 5}
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE, encoding="utf-8")


def over(text: str, *overrides: str) -> Recipe:
    Path("r.yaml").write_text(f"extends: base.yaml\n{text}", encoding="utf-8")
    return load_recipe("r.yaml", overrides)


def test_top_level_keys() -> None:
    recipe = over("name: over\nlaunch: {procs: 4}\nenv: [C]\n")
    assert recipe.name == "over"
    assert recipe.seed == 1
    assert (recipe.launch.procs, recipe.launch.device) == (4, "cpu")
    assert recipe.env == ("C",)


def test_a_slot_without_use_merges() -> None:
    recipe = over("stages: {model: {size: 3, nested: {b: [9], c: 0}}}\n")
    assert recipe.stages["model"] == SlotSpec(
        use="model.x", fields={"size": 3, "nested": {"a": 1, "b": [9], "c": 0}}
    )


def test_a_slot_with_the_same_use_merges() -> None:
    recipe = over("stages: {wrap: {use: wrap.x, stage: 3}}\n")
    assert recipe.stages["wrap"] == SlotSpec(use="wrap.x", fields={"stage": 3, "extra": {"k": 1}})


def test_a_slot_with_another_use_is_replaced_in_its_place() -> None:
    recipe = over("stages: {wrap: {use: wrap.y, bucket: 1}}\n")
    assert recipe.stages["wrap"] == SlotSpec(use="wrap.y", fields={"bucket": 1})
    assert list(recipe.stages) == ["model", "wrap", "train"]
    assert str(recipe.places.key(("stages", "wrap"))) == "r.yaml:2:10"


def test_null_removes_a_slot_and_new_slots_come_last() -> None:
    recipe = over("stages: {eval: {use: e.x}, wrap: null, model: {size: 2}}\n")
    assert list(recipe.stages) == ["model", "train", "eval"]


def test_null_in_a_field_is_a_value() -> None:
    assert over("stages: {model: {nested: null}}\n").stages["model"].fields["nested"] is None


def test_a_mapping_over_something_else_replaces_it() -> None:
    assert over("stages: {train: {steps: {a: 1}}}\n").stages["train"].fields["steps"] == {"a": 1}


def test_several_bases_in_order() -> None:
    Path("two.yaml").write_text("seed: 2\nstages: {train: {steps: 6, lr: 1.0}}\n", encoding="utf-8")
    Path("r.yaml").write_text(
        "extends: [base.yaml, two.yaml]\nstages: {train: {lr: 2.0}}\n", encoding="utf-8"
    )
    recipe = load_recipe("r.yaml")
    assert recipe.seed == 2
    assert recipe.stages["train"].fields == {"steps": 6, "lr": 2.0}
    assert [file.name for file in recipe.source_files] == ["r.yaml", "two.yaml", "base.yaml"]


def test_one_base_reached_twice_is_no_circle() -> None:
    for name in ("left", "right"):
        Path(f"{name}.yaml").write_text("extends: base.yaml\n", encoding="utf-8")
    Path("r.yaml").write_text("extends: [left.yaml, right.yaml]\n", encoding="utf-8")
    assert load_recipe("r.yaml").name == "base"


def test_overlays_see_each_other_in_interpolations() -> None:
    recipe = over("seed: 9\nstages: {train: {steps: '${seed}', also: '${stages.model.size}'}}\n")
    assert recipe.stages["train"].fields == {"steps": 9, "also": 1}


def test_places_follow_the_values() -> None:
    recipe = over("stages: {train: {steps: 6}}\n", "wrap.extra.k=2")
    origins = {
        path: recipe.origin(("stages", *path))
        for path in (
            ("train", "steps"),
            ("train", "use"),
            ("wrap", "extra", "k"),
            ("wrap", "stage"),
        )
    }
    assert origins == {
        ("train", "steps"): "r.yaml:2:25",
        ("train", "use"): "base.yaml:8:16",
        ("wrap", "extra", "k"): "command line, override 1",
        ("wrap", "stage"): "base.yaml:7:30",
    }
    assert str(recipe.places.key(("stages", "wrap"))) == "base.yaml:7:3"


@pytest.mark.parametrize(
    ("override", "slot", "key", "value"),
    [
        ("wrap.stage=3", "wrap", "stage", 3),
        ("train.lr=1e-4", "train", "lr", 1e-4),
        ("train.note=no", "train", "note", "no"),
        ("train.note=a=b", "train", "note", "a=b"),
        ("train.note=''", "train", "note", ""),
        ("train.steps=null", "train", "steps", None),
        ("model.nested.b=[3]", "model", "nested", {"a": 1, "b": [3]}),
        ("model.nested.b.1=8", "model", "nested", {"a": 1, "b": [1, 8]}),
        ("model.nested={a: 5}", "model", "nested", {"a": 5, "b": [1, 2]}),
        ("train.new.deep=1", "train", "new", {"deep": 1}),
        ("train.steps=${seed}", "train", "steps", 1),
    ],
)
def test_overrides(override: str, slot: str, key: str, value: object) -> None:
    assert over("", override).stages[slot].fields[key] == value


def test_overrides_apply_in_order_and_may_replace_a_slot() -> None:
    recipe = over("", "wrap.use=wrap.y", "wrap.bucket=1", "seed=5", "launch.procs=8", "train=null")
    assert recipe.stages["wrap"] == SlotSpec(use="wrap.y", fields={"bucket": 1})
    assert (recipe.seed, recipe.launch.procs) == (5, 8)
    assert "train" not in recipe.stages


def test_takes_merges_like_a_field_and_goes_with_the_stage(tmp_path: Path) -> None:
    base = "name: r\nstages:\n  train: {use: t.a, takes: {engine: one, callback: null}, steps: 1}\n"
    (tmp_path / "base.yaml").write_text(base)
    file = tmp_path / "r.yaml"

    def read(train: str, *overrides: str, common: tuple[str, ...] = ()) -> SlotSpec:
        file.write_text(f"extends: ./base.yaml\nstages: {{train: {train}}}\n")
        recipe, problems = read_recipe(file, overrides, lambda first, second: common)
        assert recipe is not None
        assert problems == []
        return recipe.stages["train"]

    one: dict[str, str | None] = {"engine": "one", "callback": None}
    assert read("{}") == SlotSpec(use="t.a", fields={"steps": 1}, takes=one)
    assert read("{takes: {engine: two}}").takes == {**one, "engine": "two"}
    assert read("{}", "train.takes.engine=three").takes == {**one, "engine": "three"}
    assert read("{}", "train.takes=null").takes == {}
    assert read("{use: t.b}").takes == {}
    assert read("{}", "train.use=t.b").takes == {}
    assert read("{}", "train.use=t.b", common=("takes",)).takes == one
    both = ("train.takes.engine=two", "train.use=t.b")
    assert read("{}", *both, common=("takes",)).takes == {**one, "engine": "two"}


def test_fields_of_both_stages_stay_where_an_override_replaces_a_stage(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "name: r\nstages:\n  optimizer: {use: o.a, lr: 0.3, betas: [1], note: x}\n"
    )

    def read(*overrides: str) -> tuple[SlotSpec, list[str]]:
        file = tmp_path / "r.yaml"
        recipe, problems = read_recipe(file, overrides, lambda first, second: ("lr", "note"))
        assert recipe is not None
        assert problems == []
        return recipe.stages["optimizer"], [str(note) for note in recipe.replaced]

    slot, [note] = read("optimizer.use=o.b")
    assert slot == SlotSpec(use="o.b", fields={"lr": 0.3, "note": "x"})
    assert note == (
        "command line, override 1: optimizer: o.a became o.b: kept lr, note; dropped betas, which "
        "it does not have (r.yaml:3:14)"
    )
    slot, [note] = read("optimizer.use=o.b", "optimizer.lr=1", "optimizer.k=2")
    assert slot == SlotSpec(use="o.b", fields={"lr": 1, "note": "x", "k": 2})
    slot, [note] = read("optimizer.betas=[2]", "optimizer.use=o.b")
    assert slot.fields == {"lr": 0.3, "betas": [2], "note": "x"}  # the command line says so
    assert read("optimizer.use=o.a", "optimizer.lr=1")[1] == []


def test_a_file_that_replaces_a_stage_is_told_which_fields_it_lost(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("name: r\nstages:\n  o: {use: o.a, lr: 0.3, note: x}\n")

    def notes(slot: str) -> list[str]:
        (tmp_path / "r.yaml").write_text(f"extends: base.yaml\nstages:\n  o: {slot}\n")
        recipe, _ = read_recipe(tmp_path / "r.yaml", (), lambda first, second: ("lr",))
        assert recipe is not None
        assert recipe.stages["o"].fields.get("note") is None
        return [str(note) for note in recipe.replaced]

    assert notes("{use: o.b}") == [
        "r.yaml:3:12: o: replaces o.a of base.yaml:3:6 with its lr, which "
        "has its default now (set lr here too)"
    ]
    assert notes("{use: o.b, lr: 1}") == []


def test_an_override_of_extends_is_refused() -> None:
    with pytest.raises(RecipeError, match="the recipe has no slot `extends`"):
        over("", "extends=other.yaml")


def test_a_new_slot_comes_behind_the_one_that_stands_before_it() -> None:
    recipe = over("stages: {model: {}, adapter: {use: a.x}, more: {use: m.x}, last: {use: l.x}}\n")
    assert list(recipe.stages) == ["model", "adapter", "more", "last", "wrap", "train"]
    alone = over("stages: {adapter: {use: a.x}, train: {}, more: {use: m.x}}\n")
    assert list(alone.stages) == ["model", "wrap", "train", "more", "adapter"]
    removed = over("stages: {wrap: null, adapter: {use: a.x}}\n")
    assert list(removed.stages) == ["model", "adapter", "train"]
