"""Reading, resolving and writing recipes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import Location
from pipeline.recipe import Launch, SlotSpec, load_recipe, read_recipe
from pipeline.recipe.dump import render
from pipeline.recipe.interpolation import resolve
from pipeline.recipe.nodes import node_of
from tests.support.tier import examples


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def fields(tmp_path: Path, yaml_fields: str, head: str = "") -> dict[str, Any]:
    """Return the fields of one slot."""
    lines = "".join(f"    {line}\n" for line in yaml_fields.splitlines())
    text = f"name: r\n{head}stages:\n  a:\n    use: x.y\n{lines}"
    return dict(load_recipe(write(tmp_path / "r.yaml", text)).stages["a"].fields)


def test_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path / "r.yaml", "name: r\nstages: {a: {use: x.y, b: 1}}\n"))
    assert recipe.name == "r"
    assert recipe.seed == 0
    assert recipe.launch == Launch(procs=None, device="auto", threads=None)
    assert recipe.stages == {"a": SlotSpec(use="x.y", fields={"b": 1})}
    assert recipe.source_files == (tmp_path / "r.yaml",)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("FALSE", False),
        ("no", "no"),
        ("on", "on"),
        ("y", "y"),
        ("null", None),
        ("~", None),
        ("", None),
        ("''", ""),
        ("-8", -8),
        ("+3", 3),
        ("0", 0),
        ("007", "007"),
        ("0x10", "0x10"),
        ("0o17", "0o17"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("3.", 3.0),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("1e999", "1e999"),
        ("9" * 41, "9" * 41),
        ("'8'", "8"),
        ("=", "="),
    ],
)
def test_scalars_mean_what_they_look_like(tmp_path: Path, text: str, value: object) -> None:
    found = fields(tmp_path, f"b: {text}")["b"]
    assert found == value
    assert type(found) is type(value)


def test_keys_and_aliases(tmp_path: Path) -> None:
    assert fields(tmp_path, "b: {1: x, true: y, no: z}")["b"] == {"1": "x", "true": "y", "no": "z"}
    assert fields(tmp_path, "b: &x [1]\nc: *x") == {"b": [1], "c": [1]}


def test_dotted_paths_are_relative_to_the_file_or_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("sub", "elsewhere"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    write(
        tmp_path / "sub/base.yaml", "name: r\nstages: {a: {use: x.y, b: ./in, c: ../up, d: in}}\n"
    )
    file = write(tmp_path / "r.yaml", "extends: sub/base.yaml\nstages: {a: {e: [./here]}}\n")
    assert load_recipe(file, ["a.f=./in"]).stages["a"].fields == {
        "b": str(tmp_path / "sub/in"),
        "c": str(tmp_path / "up"),
        "d": "in",
        "e": [str(tmp_path / "here")],
        "f": str(tmp_path / "elsewhere/in"),
    }


def test_interpolation(tmp_path: Path) -> None:
    found = fields(
        tmp_path,
        "b: ${seed}\nc: ${.b}\nd: run-${seed}/${stages.a.e.f}\ne: {f: 1e-4}\n"
        "g: ${.e}\nh: \\${seed}\ni: [x, '${..b}']",
        head="seed: 7\n",
    )
    assert found == {
        "b": 7,
        "c": 7,
        "d": "run-7/0.0001",
        "e": {"f": 1e-4},
        "g": {"f": 1e-4},
        "h": "${seed}",
        "i": ["x", 7],
    }


def test_environment_variables_are_text_and_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPE_TEST", "${oc.decode:'[1,2]'}")
    found = fields(
        tmp_path,
        "b: ${oc.env:PIPE_TEST}\nc: ${oc.env:PIPE_UNSET,8}\nd: ${.b}",
        head="env: [PIPE_TEST, PIPE_UNSET]\n",
    )
    assert found == {"b": "${oc.decode:'[1,2]'}", "c": "8", "d": "${oc.decode:'[1,2]'}"}


SECRET = """\
name: r
env: [PIPE_SECRET]
stages:
  a:
    use: x.y
    direct: ${oc.env:PIPE_SECRET}
    mixed: "a/${oc.env:PIPE_SECRET}/b"
    indirect: ${.direct}
    nested: {deep: "${stages.a.direct}"}
    whole: ${.nested}
    seeded: ${name}
"""


@pytest.mark.parametrize(
    "text",
    [
        r"${oc.env:A,\${oc.env:SECRET}}", r"${oc.env:A,x\${oc.env:SECRET}}",
        r"${oc.env:A,[\${oc.env:SECRET}]}", r'${oc.env:A,"\\${oc.env:SECRET}"}',
        r"${oc.env:A,'\'${oc.env:SECRET}'}", r"\\${oc.env:SECRET}", r"${ oc.env : SECRET }",
        "${oc.env:'SECRET'}", "${oc.env:A,${oc.env:SECRET}}", "${oc.env:${x}SECRET}",
    ],
)  # fmt: skip
def test_no_variable_is_read_that_is_not_listed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    monkeypatch.delenv("A", raising=False)
    tree = node_of({"env": ["A"], "x": "", "a": text}, Location(file="r.yaml"))
    data, problems = resolve(tree)
    assert "hunter2" not in str(data)
    assert any("is not in the recipe's `env` list" in problem.message for problem in problems)


def test_environment_values_are_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPE_SECRET", "hunter2")
    recipe = load_recipe(write(tmp_path / "r.yaml", SECRET))
    assert recipe.stages["a"].fields["whole"] == {"deep": "hunter2"}
    assert "hunter2" not in recipe.dump()
    assert recipe.public()["stages"]["a"] == {
        "use": "x.y",
        "direct": "${oc.env:PIPE_SECRET}",
        "mixed": "a/${oc.env:PIPE_SECRET}/b",
        "indirect": "${.direct}",
        "nested": {"deep": "${stages.a.direct}"},
        "whole": "${.nested}",
        "seeded": "r",
    }


def test_a_dump_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPE_SECRET", "hunter2")
    write(tmp_path / "base.yaml", SECRET)
    overlay = "extends: base.yaml\nseed: 4\nlaunch: {procs: 2}\nstages: {a: {p: ./x}}\n"
    recipe = load_recipe(write(tmp_path / "r.yaml", overlay), ["a.q=[1, null]"])
    (tmp_path / "other").mkdir()
    again = load_recipe(write(tmp_path / "other/recipe.yaml", recipe.dump()))
    assert again == recipe
    assert again.stages["a"].fields["p"] == str(tmp_path / "x")
    assert "extends" not in recipe.dump()


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["no", "1e-4", "12:30", "007", "1_000", "null", "~", "<<", "=", "- a", "a: b", "a #b", "---",
     "...", ".5", "+.5e3", "0o7", "true", "{", "[", "*a", "&a", "!a", "%a", "@a", "`a", "\\", "\n"]
)  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT.filter(lambda text: "${" not in text and text != "???" and not text.startswith("."))
)
KEYS = TEXT.filter(bool)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)
NESTED = st.dictionaries(KEYS.filter(lambda key: key != "use"), VALUES, max_size=4)


def many(quick: int) -> settings:
    fixture = HealthCheck.function_scoped_fixture
    return settings(examples(quick), suppress_health_check=[fixture], deadline=None)


@many(37)
@given(values=NESTED)
def test_any_values_survive_dump_and_load(tmp_path: Path, values: dict[str, Any]) -> None:
    """Other readers of YAML agree on the text."""
    text = render({"name": "r", "stages": {"a": {"use": "x.y", **values}}})
    assert yaml.safe_load(text)["stages"]["a"] == {"use": "x.y", **values}
    recipe = load_recipe(write(tmp_path / "r.yaml", text))
    found = dict(recipe.stages["a"].fields)
    assert found == values
    assert list(map(type, found.values())) == list(map(type, values.values()))
    assert load_recipe(write(tmp_path / "s.yaml", recipe.dump())) == recipe


@pytest.mark.parametrize(
    "text", ["${" * 2000 + "a" + "}" * 2000, "${oc.env:X," * 2000 + "a" + "}" * 2000, "${a}" * 2000]
)
def test_thousands_of_interpolations_in_a_text_are_not_parsed(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"name: '{text}'\nstages: {{}}\n")
    began = time.process_time()
    _, problems = read_recipe(tmp_path / "recipe.yaml")
    assert any("more than 50 interpolations in one text" in str(each) for each in problems)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("place", ["recipe.yaml", "base.yaml"])
def test_a_pipe_or_a_device_is_no_recipe(place: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\nextends: base.yaml\nstages: {}\n")
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        path = tmp_path / place
        if path.is_file():
            path.unlink()
        make(path)
        _, problems = read_recipe(tmp_path / "recipe.yaml")
        assert [("not a file" in str(each)) for each in problems] == [True]
        path.rmdir() if path.is_dir() else path.unlink()
