"""Faulty packages: the messages of `pipe`, and its work with all other packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pipe import Outcome, Pipe
from tests.support.plugins import install

GOOD = """
    from dataclasses import dataclass

    from pipeline.contracts.stage import Context

    @dataclass(frozen=True, kw_only=True)
    class Nothing:
        '''Do nothing.'''

        def run(self, ctx: Context) -> None: ...
"""


def pipe(folder: Path, *args: str) -> Outcome:
    """Return a call of `pipe ARGS` where the packages in `folder` are installed."""
    return Pipe(folder, folder)(*args)


def recipe(folder: Path, use: str) -> None:
    text = f"name: test\nstages:\n  only:\n    use: {use}\n"
    (folder / "r.yaml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "raise RuntimeError('no licence')",
            "cannot be loaded: RuntimeError: no licence, at {file}:1 (repair or uninstall "
            "acme-stages)",
        ),
        (
            "import acme_missing",
            "cannot be loaded: ModuleNotFoundError: No module named 'acme_missing', at "
            "{file}:1 (repair or uninstall acme-stages)",
        ),
        (
            "def f(:",
            "cannot be loaded: SyntaxError: invalid syntax (acme.py, line 1), at {file}:1 "
            "(repair or uninstall acme-stages)",
        ),
        (
            GOOD.replace("(frozen=True, kw_only=True)", "").replace(
                "'''Do nothing.'''", "a: int = 1\n        b: str"
            ),
            "cannot be loaded: TypeError: non-default argument 'b' follows default argument, at "
            "{file}:6 (write `@dataclass(frozen=True, kw_only=True)`)",
        ),
        ("class Nothing: ...", "(acme:Nothing) is not a dataclass"),
        (GOOD.replace("frozen=True, ", ""), "(acme:Nothing) is not a frozen dataclass"),
    ],
)
def test_a_package_at_fault_is_named(tmp_path: Path, source: str, message: str) -> None:
    install(tmp_path, "acme-stages", "acme", source, {"custom.nothing": "Nothing"})
    recipe(tmp_path, "custom.nothing")
    told = message.format(file=tmp_path / "acme.py")
    expected = f"stage `custom.nothing` of acme-stages 1.0 {told}"
    checked = pipe(tmp_path, "check", "r.yaml")
    assert checked.code == 2
    assert checked.stderr == f"r.yaml:4:10: only.use: {expected}\n"
    explained = pipe(tmp_path, "stages", "custom.nothing")
    assert (explained.code, explained.stderr) == (2, f"error: {expected}\n")


CHECKED = GOOD.replace("def run", "def check(self, plan):\n            {}\n\n        def run")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return ['one', 'two']", "check of callback.mine yields str instead of Problem"),
        ("plan.nope", "check of callback.mine failed: AttributeError: 'PlanView' object has no "
         "attribute 'nope', at {file}:12"),
    ],
)  # fmt: skip
def test_a_check_at_fault_is_named(tmp_path: Path, body: str, message: str) -> None:
    source = CHECKED.format(body).replace("-> None", "-> StepCallback")
    source = source.replace(
        "import dataclass", "import dataclass\n    from pipeline import StepCallback"
    )
    install(tmp_path, "acme-stages", "acme", source, {"callback.mine": "Nothing"})
    recipe(tmp_path, "callback.mine")
    told = message.format(file=tmp_path / "acme.py")
    assert pipe(tmp_path, "check", "r.yaml").stderr == f"r.yaml:3:3: only: {told}\n"


def test_a_stage_that_returns_something_else_than_its_kind(tmp_path: Path) -> None:
    """Other slots are not blamed."""
    install(tmp_path, "acme-stages", "acme", GOOD.replace("-> None", "-> Context"),
            {"callback.mine": "Nothing"})  # fmt: skip
    recipe(tmp_path, "callback.mine")
    said = "callback.mine returns Context; stages of kind callback return StepCallback"
    assert pipe(tmp_path, "check", "r.yaml").stderr == f"r.yaml:4:10: only.use: {said}\n"


@pytest.mark.parametrize(
    ("annotation", "told"),
    [
        ("np.ndarray", "field `a`: the type ndarray"),
        ("tuple[Own, ...] | None", "field `a`: the type Own"),
        ("dict[str, Inner]", "field `a.b`: the type Own"),
        ("NDArray[np.int64]", "field `a`: the type ndarray"),
    ],
)
def test_a_type_that_no_recipe_can_hold(tmp_path: Path, annotation: str, told: str) -> None:
    fields = f"'''Do nothing.'''\n\n        a: {annotation}\n        n: int = 0"
    inner = """import numpy as np
    from numpy.typing import NDArray

    class Own: ...

    @dataclass(frozen=True, kw_only=True)
    class Inner:
        b: Own

    @dataclass(frozen=True, kw_only=True)
    class Nothing"""
    source = GOOD.replace("'''Do nothing.'''", fields)
    source = source.replace("@dataclass(frozen=True, kw_only=True)\n    class Nothing", inner)
    install(tmp_path, "acme-stages", "acme", source, {"custom.nothing": "Nothing"})
    recipe(tmp_path, "custom.nothing")
    why = f"acme.Nothing: {told} cannot be written in a recipe"
    hint = "(use numbers, texts, lists, mappings, dataclasses)"
    assert pipe(tmp_path, "check", "r.yaml").stderr == f"r.yaml:4:10: only.use: {why} {hint}\n"


EXPORT = """
    from dataclasses import dataclass

    from pipeline import Context, ExportedModel

    @dataclass(frozen=True, kw_only=True)
    class Npz:
        '''Write arrays.'''

        def run(self, ctx: Context) -> ExportedModel: ...

        @classmethod
        def verify({}):
            return folder.nope
"""
VERIFY = (
    "@classmethod def verify(cls, folder: Path, report: Callable[[str], object], *, "
    "trust_remote_code: bool) -> None"
)


def verified(folder: Path, source: str) -> str:
    """Return what `pipe verify` says of an export of a plugin."""
    install(folder, "acme-stages", "acme", source, {"export.npz": "Npz"})
    (folder / "export").mkdir()
    (folder / "export/export.json").write_text('{"writer": "export.npz"}')
    return pipe(folder, "verify", "export").stderr


def test_a_verify_that_cannot_be_called(tmp_path: Path) -> None:
    assert verified(tmp_path, EXPORT.format("cls, folder")) == (
        "error: stage `export.npz` of acme-stages 1.0 (acme:Npz) has a `verify` that `pipe verify` "
        f"cannot call: write `{VERIFY}`\n"
    )


def test_an_export_that_cannot_be_verified(tmp_path: Path) -> None:
    source = EXPORT.partition("@classmethod")[0]
    wrote = f"the stage export.npz, which wrote {tmp_path}/export,"
    hint = f"(its class lacks `{VERIFY}`)"
    assert verified(tmp_path, source) == f"error: {wrote} cannot verify it {hint}\n"
    (tmp_path / "acme_stages-1.0.dist-info/entry_points.txt").unlink()
    assert pipe(tmp_path, "verify", "export").stderr == (
        f"error: {wrote} is not installed (install its package into this environment)\n"
    )


def test_a_bug_of_a_plugin_is_not_ours(tmp_path: Path) -> None:
    said = verified(tmp_path, EXPORT.format("cls, folder, report, *, trust_remote_code"))
    assert said.startswith(
        "error: a bug in the stage export.npz of acme-stages 1.0: AttributeError: 'PosixPath' "
        f"object has no attribute 'nope', at {tmp_path}/acme.py:14 (report it to its authors with "
    )


def test_one_name_from_two_packages(tmp_path: Path) -> None:
    install(tmp_path, "acme-stages", "acme", GOOD, {"custom.nothing": "Nothing"})
    install(tmp_path, "other-stages", "other", GOOD, {"custom.nothing": "Nothing"})
    recipe(tmp_path, "custom.nothing")
    checked = pipe(tmp_path, "check", "r.yaml")
    assert checked.code == 2
    assert checked.stderr == (
        "r.yaml:4:10: only.use: stage `custom.nothing` is registered by acme-stages 1.0 and "
        "other-stages 1.0 (uninstall one of them)\n"
    )


def test_recipes_without_it_do_not_suffer(tmp_path: Path) -> None:
    install(tmp_path, "acme-stages", "acme", "raise RuntimeError", {"wrap.acme": "Nothing"})
    recipe(tmp_path, "precision.policy")
    checked = pipe(tmp_path, "check", "r.yaml")
    assert (checked.code, checked.stderr) == (0, "")
    listed = pipe(tmp_path, "stages")
    assert listed.code == 0
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("wrap.acme ")]
    assert "acme-stages 1.0" in line
    assert "cannot be used: stage `wrap.acme` of acme-stages 1.0 cannot be loaded" in line


def test_two_good_packages(tmp_path: Path) -> None:
    install(tmp_path, "acme-stages", "acme", GOOD, {"custom.one": "Nothing"})
    install(tmp_path, "other-stages", "other", GOOD, {"custom.two": "Nothing"})
    recipe(tmp_path, "custom.two")
    assert pipe(tmp_path, "check", "r.yaml").stdout == "ok: test: 1 stage: custom.two\n"
