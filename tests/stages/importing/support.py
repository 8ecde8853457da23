"""Translate configurations, and compare recipes and reasons with those of `cases/`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from pipeline.importing.translator import (
    ConfigFile,
    KeyOutcome,
    Request,
    Translation,
    Translator,
    read_config,
)
from stages.importing.axolotl import Axolotl
from stages.importing.hugging_face import HuggingFace
from stages.importing.llama_factory import LlamaFactory
from stages.importing.torchtune import Torchtune

CONFIGS, CASES = (Path(__file__).with_name(name) for name in ("configs", "cases"))
TRANSLATORS: Mapping[str, Translator] = {
    "axolotl": Axolotl(), "llama_factory": LlamaFactory(), "torchtune": Torchtune(),
    "trainer": HuggingFace(), "engines": HuggingFace(),
}  # fmt: skip
"""Name of a file of `cases/` -> its translator."""


def config(name: str) -> dict[str, Any]:
    """Return the content of a file of `configs/`."""
    found: dict[str, Any] = yaml.safe_load((CONFIGS / name).read_text("utf-8"))
    return found


def file(name: str, content: Mapping[str, Any]) -> ConfigFile:
    return ConfigFile(path=Path(name), content=content)


def translated(*contents: Mapping[str, Any], **request: Any) -> Translation:
    """Translate files of Hugging Face's tools with these contents: `0.json`, `1.json`, ..."""
    files = [file(f"{number}.json", content) for number, content in enumerate(contents)]
    return HuggingFace().translate(files, Request(**request))


def from_files(folder: Path, *names: str, **request: Any) -> Translation:
    """Translate the named files together."""
    return HuggingFace().translate(
        [read_config(folder / name) for name in names], Request(**request)
    )


def made(
    tool: str, said: Mapping[str, Any], base: Mapping[str, Any] = {}, procs: int | None = None,
    files: Sequence[str] = (),
) -> Translation:  # fmt: skip
    """Translate keys next to those of `base`. Special ones: `=` has the keys or the name of a file
    that stands in for the base, `--with` other files, `--alone` leaves `files` out, `--name` is the
    name of the recipe; `--procs`, `--model` and `--data` are the user's options."""
    plain = {key: value for key, value in said.items() if key != "=" and not key.startswith("--")}
    whole = said.get("=", {**base, **plain})
    content = config(whole) if isinstance(whole, str) else whole
    others = dict.fromkeys(() if said.get("--alone") else files) | said.get("--with", {})
    hugging_face = tool in ("trainer", "engines")
    read = [file(said.get("--name", "0.json" if hugging_face else "recipe.yaml"), content)]
    for name, other in others.items():
        folder = "data" if "dataset_info" in name else ""
        path = str(Path(folder, Path(name).name.replace("info.yaml", "info.json")))
        read.append(file(path, config(name) if other is None else other))
    request = {key: said[f"--{key}"] for key in ("model", "data") if f"--{key}" in said}
    translator = TRANSLATORS[tool]
    assert translator.supports(read)
    return translator.translate(read, Request(procs=said.get("--procs", procs), **request))


def fields(made: Translation) -> dict[str, Any]:
    """Return the recipe's fields by dotted keys, without those of blocks in slots. `null` is text,
    as None stands for a field that is not there."""
    if made.recipe is None:
        return {}
    found: dict[str, Any] = {"missing": sorted(made.missing)} if made.missing else {}
    for key, block in {**made.recipe, **made.recipe["stages"]}.items():
        inner = block if isinstance(block, Mapping) and key != "stages" else {}
        found |= {
            f"{key}.{name}": "null" if value is None else value for name, value in inner.items()
        }
        found |= {} if isinstance(block, Mapping) else {key: block}
    text = yaml.safe_dump(found, sort_keys=False).replace(str(Path.cwd()), "HERE")
    return yaml.safe_load(text)  # type: ignore[no-any-return]


def differences(found: Translation, base: Translation | None) -> Any:
    """Return the fields that differ from those of the base, None for those that only it has;
    `none` if there is no recipe."""
    if found.recipe is None:
        return "none"
    ours, theirs = fields(found), {} if base is None else fields(base)
    return {key: ours.get(key) for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)}


def reasons(found: Translation, base: Translation | None) -> dict[str, str]:
    """Return key -> outcome, reason and hint where they differ from those of the base."""

    def said(each: KeyOutcome) -> str:
        hint = f" ({each.hint})" if each.hint else ""
        outcome = "" if each.outcome == "translated" else each.outcome
        return f"{outcome} {each.why}{hint}".strip()

    ours = {each.key: said(each) for each in found.outcomes}
    theirs = {} if base is None else {each.key: said(each) for each in base.outcomes}
    off = ("", "default is not set, or off")
    return {key: text for key, text in ours.items() if text not in (*off, theirs.get(key))}


class Case(NamedTuple):
    """A row of a file of `cases/`: keys, the fields of the recipe that differ from that of `base`
    (all of them if there are no keys, or a file), or `none` without a recipe, and the beginnings of
    the reasons of keys that are not in it."""

    tool: str
    said: Mapping[str, Any]
    recipe: Mapping[str, Any] | str
    why: Mapping[str, str] = {}


@functools.cache
def content_of(tool: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CASES / f"{tool}.yaml").read_text("utf-8"))
    return found


def cases(*tools: str) -> list[Any]:
    """Return the rows of the files, as parameters."""
    rows = [Case(tool, *row) for tool in tools for row in content_of(tool)["cases"]]
    return [
        pytest.param(row, id=f"{number} {str(row.said)[:50]}") for number, row in enumerate(rows)
    ]


def assert_case(case: Case) -> None:
    """Assert that the keys become what the row says."""
    content = content_of(case.tool)
    besides = (content["base"], content.get("procs"), content.get("files", ()))
    found = made(case.tool, case.said, *besides)
    whole = not case.said or isinstance(case.said.get("="), str)
    base = None if whole else made(case.tool, {}, *besides)
    assert differences(found, base) == case.recipe
    told = reasons(found, base)
    assert told.keys() == case.why.keys()
    for key, text in case.why.items():
        assert told[key].startswith(text), key


def outcomes(made: Translation) -> dict[str, str]:
    """Return key -> outcome, for keys that appear once."""
    found = {each.key: each.outcome for each in made.outcomes}
    assert len(found) == len(made.outcomes)
    return found


def slot(made: Translation, name: str) -> dict[str, Any]:
    """Return a slot's fields."""
    assert made.recipe is not None
    return {**made.recipe["stages"][name]}


def outcome(made: Translation, key: str) -> KeyOutcome:
    """Return the outcome of the one key of that name."""
    (found,) = [each for each in made.outcomes if each.key == key]
    return found


def left_out(made: Translation) -> dict[str, str]:
    """Return the reason for each key that the recipe lacks; empty for keys not translated."""
    return {each.key: each.why for each in made.outcomes if each.left_out}
