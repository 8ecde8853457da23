"""Merging of files and overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RecipeError
from pipeline.recipe import Recipe, SlotSpec, load_recipe, read_recipe
from pipeline.recipe.merge import Meant, torn

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
    assert (recipe.name, recipe.seed, recipe.env) == ("over", 1, ("C",))
    assert (recipe.launch.procs, recipe.launch.device) == (4, "cpu")


@pytest.mark.parametrize(
    ("overlay", "slot", "use", "fields"),
    [
        ("model: {size: 3, nested: {b: [9], c: 0}}", "model", "model.x",
         {"size": 3, "nested": {"a": 1, "b": [9], "c": 0}}),
        ("model: {nested: null}", "model", "model.x", {"size": 1, "nested": None}),
        ("train: {steps: {a: 1}}", "train", "train.x", {"steps": {"a": 1}}),
        ("wrap: {use: wrap.x, stage: 3}", "wrap", "wrap.x", {"stage": 3, "extra": {"k": 1}}),
        ("wrap: {use: wrap.y, bucket: 1}", "wrap", "wrap.y", {"bucket": 1}),
    ],
)  # fmt: skip
def test_a_slot_over_another(overlay: str, slot: str, use: str, fields: dict[str, Any]) -> None:
    recipe = over(f"stages: {{{overlay}}}\n")
    assert recipe.stages[slot] == SlotSpec(use=use, fields=fields)
    assert list(recipe.stages) == ["model", "wrap", "train"]


@pytest.mark.parametrize(
    ("overlay", "order"),
    [
        ("eval: {use: e.x}, wrap: null, model: {size: 2}", "model train eval"),
        # a new slot comes after the one that stands before it
        ("model: {}, adapter: {use: a.x}, more: {use: m.x}, last: {use: l.x}",
         "model adapter more last wrap train"),
        ("adapter: {use: a.x}, train: {}, more: {use: m.x}", "model wrap train more adapter"),
        ("wrap: null, adapter: {use: a.x}", "model adapter train"),
    ],
)  # fmt: skip
def test_the_order_of_slots(overlay: str, order: str) -> None:
    assert list(over(f"stages: {{{overlay}}}\n").stages) == order.split()


def test_several_bases_in_order() -> None:
    Path("two.yaml").write_text("seed: 2\nstages: {train: {steps: 6, lr: 1.0}}\n", encoding="utf-8")
    Path("r.yaml").write_text(
        "extends: [base.yaml, two.yaml]\nstages: {train: {lr: 2.0}}\n", encoding="utf-8"
    )
    recipe = load_recipe("r.yaml")
    assert recipe.seed == 2
    assert recipe.stages["train"].fields == {"steps": 6, "lr": 2.0}
    assert [file.name for file in recipe.source_files] == ["r.yaml", "two.yaml", "base.yaml"]
    # one base reached twice is no circle
    Path("left.yaml").write_text("extends: base.yaml\n", encoding="utf-8")
    Path("r.yaml").write_text("extends: [left.yaml, base.yaml]\n", encoding="utf-8")
    assert load_recipe("r.yaml").name == "base"


def test_overlays_see_each_other_in_interpolations() -> None:
    recipe = over("seed: 9\nstages: {train: {steps: '${seed}', also: '${stages.model.size}'}}\n")
    assert recipe.stages["train"].fields == {"steps": 9, "also": 1}


def test_places_follow_the_values() -> None:
    recipe = over("stages: {train: {steps: 6}}\n", "wrap.extra.k=2")
    origins = {
        "train.steps": "r.yaml:2:25",
        "train.use": "base.yaml:8:16",
        "wrap.extra.k": "command line, override 1",
        "wrap.stage": "base.yaml:7:30",
        "wrap.nothing": "default",
    }
    assert {key: recipe.origin(("stages", *key.split("."))) for key in origins} == origins
    tree, nested = recipe.tree, ("stages", "model", "nested", "b")
    keys = [tree.key_place(path) for path in (nested, ("stages", "wrap", "zzz", "deeper"))]
    assert [*map(str, keys)] == ["base.yaml:6:49", "base.yaml:7:3"]
    assert [str(tree.place((*nested, n))) for n in (1, 7)] == ["base.yaml:6:56", "base.yaml:6:52"]
    assert str(tree.place(("stages", "wrap", "extra", "k"))) == "command line, override 1"
    replaced = over("stages: {wrap: {use: wrap.y}}\n")
    assert str(replaced.tree.key_place(("stages", "wrap"))) == "r.yaml:2:10"


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
    with pytest.raises(RecipeError, match="the recipe has no slot `extends`"):
        over("", "extends=other.yaml")


def replacing(
    base: str, slot: str, *overrides: str, common: tuple[str, ...] = ()
) -> tuple[SlotSpec, list[str]]:
    """Return the slot `one` of a base under a file and overrides, and what is noted about it."""
    Path("base.yaml").write_text(f"name: r\nstages:\n  one: {base}\n", encoding="utf-8")
    Path("r.yaml").write_text(f"extends: base.yaml\nstages:\n  one: {slot}\n", encoding="utf-8")
    recipe, problems = read_recipe("r.yaml", overrides, lambda first, second: common)
    assert recipe is not None
    assert problems == []
    return recipe.stages["one"], [str(note) for note in recipe.replaced]


def test_takes_merges_like_a_field_and_goes_with_the_stage() -> None:
    base = "{use: t.a, takes: {engine: one, callback: null}, steps: 1}"
    one: dict[str, str | None] = {"engine": "one", "callback": None}

    def takes(slot: str, *overrides: str, common: tuple[str, ...] = ()) -> object:
        return replacing(base, slot, *overrides, common=common)[0].takes

    assert replacing(base, "{}")[0] == SlotSpec(use="t.a", fields={"steps": 1}, takes=one)
    assert takes("{takes: {engine: two}}") == {**one, "engine": "two"}
    assert takes("{}", "one.takes.engine=three") == {**one, "engine": "three"}
    assert takes("{}", "one.takes=null") == {}
    assert takes("{use: t.b}") == {}
    assert takes("{}", "one.use=t.b") == {}
    assert takes("{}", "one.use=t.b", common=("takes",)) == one
    both = ("one.takes.engine=two", "one.use=t.b")
    assert takes("{}", *both, common=("takes",)) == {**one, "engine": "two"}


def test_fields_of_both_stages_stay_where_an_override_replaces_a_stage() -> None:
    def read(*overrides: str) -> tuple[SlotSpec, list[str]]:
        base = "{use: o.a, lr: 0.3, betas: [1], note: x}"
        return replacing(base, "{}", *overrides, common=("lr", "note"))

    slot, [note] = read("one.use=o.b")
    assert slot == SlotSpec(use="o.b", fields={"lr": 0.3, "note": "x"})
    assert note == (
        "command line, override 1: one: o.a became o.b: kept lr, note; dropped betas, which "
        "it does not have (base.yaml:3:8)"
    )
    slot, [note] = read("one.use=o.b", "one.lr=1", "one.k=2")
    assert slot == SlotSpec(use="o.b", fields={"lr": 1, "note": "x", "k": 2})
    slot, [note] = read("one.betas=[2]", "one.use=o.b")
    assert slot.fields == {"lr": 0.3, "betas": [2], "note": "x"}  # the command line says so
    assert read("one.use=o.a", "one.lr=1")[1] == []


def test_fields_that_a_file_loses_where_it_replaces_a_stage_are_named() -> None:
    base = "{use: o.a, lr: 0.3, note: x}"
    slot, notes = replacing(base, "{use: o.b}", common=("lr",))
    assert slot.fields == {}
    assert notes == [
        "r.yaml:3:14: one: replaces o.a of base.yaml:3:8 with its lr, which "
        "has its default now (set lr here too)"
    ]
    assert replacing(base, "{use: o.b, lr: 1}", common=("lr",))[1] == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["train.steps=5"], None),
        (["train.steps=a=b"], None),
        (["train.steps", "5"], Meant(override="train.steps=5", words=1)),
        (["train.steps:", "5"], Meant(override="train.steps=5", words=1)),
        (["train.steps: 5"], Meant(override="train.steps=5")),
        (["train.steps", "=", "5"], Meant(override="train.steps=5", words=2)),
        (["--train.steps=5"], Meant(override="train.steps=5")),
        (["+train.steps=5"], Meant(override="train.steps=5")),
        (["train/steps=5"], Meant(override="train.steps=5")),
        (["train.steps", "wrap.stage=2"], Meant()),
        (["a.b={c:", "1}"], Meant(override="'a.b={c: 1}', in quotes", words=1)),
        (["train.steps= 5"], None),
        (["a.b=\n- c"], None),
        (["a.b=[ ':)','[a' ]", "a.c=]"], None),
        (["a.b=[c", "a.d=e]"], None),
        (["--train.steps=", "5"], Meant(override="train.steps=5", words=1)),
    ],
)
def test_what_is_meant(words: list[str], meant: Meant | None) -> None:
    assert torn(words[0], words[1:]) == meant


@pytest.mark.parametrize("word", ["a=yes", "a=@b", "a=[b", "a=b: c: d"])
def test_a_value_that_no_word_completes(word: str) -> None:
    assert torn(word, ["c.d=e", "]"]) is None


WORDS = st.text(st.sampled_from("ab.=:-+{}[] 5/"), max_size=8)


@given(words=st.lists(WORDS, min_size=1, max_size=4))
def test_no_more_words_are_taken_than_there_are(words: list[str]) -> None:
    meant = torn(words[0], words[1:])
    assert meant is None or 0 <= meant.words < len(words)
