"""Each broken recipe gives exactly these lines, exit code 2, and no traceback."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.chain.registry import Entry, Registry
from pipeline.cli import main
from pipeline.recipe.includes import OTHER_TOOLS

FAULTY = f"{Path(__file__).parents[1] / 'fake_stages.py'}:165"
GOOD = """\
name: good
stages:
  model: {use: model.fake}
  data:
    use: data.text
    files: [a.txt]
  optimizer: {use: optimizer.adam}
  wrap:
    use: wrap.red
  checkpoint: {use: checkpoint.red}
  train:
    use: train.lm
    steps: 5
"""
CASES = dict(
    block.removeprefix("# ").split("\n", 1)
    for block in Path(__file__).with_name("broken_recipes.txt").read_text().split("\n\n")
)
"""Name -> changes of the good recipe (`old => new`, to the end without `old`) or a whole one (`=`),
files that have it (`@`; r.yaml is the last), overrides (`$`), and the lines that are expected."""


def read(case: str) -> tuple[dict[str, str], list[str], list[str]]:
    """Return a case's files, overrides and expected lines."""
    files, overrides, expected = {"r.yaml": GOOD}, [], []
    for line in case.replace("FAULTY", FAULTY).splitlines():
        change = re.fullmatch("(.*?) ?=> ?(.*)", line)
        if line.startswith("= "):
            files["r.yaml"] = line[2:].encode().decode("unicode_escape")
        elif line.startswith("@ "):
            files[line[2:]] = files["r.yaml"]
        elif line.startswith("$ "):
            overrides.append(line[2:])
        elif change:
            old, new = (part.encode().decode("unicode_escape") for part in change.groups())
            text = files["r.yaml"]
            assert old in text
            files["r.yaml"] = text.replace(old, new) if old else text + new
        else:
            expected.append(line)
    return files, overrides, expected


def assert_refused(result: Result, lines: list[str]) -> None:
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert sorted(result.stderr.splitlines()) == sorted(lines)


@pytest.mark.parametrize("case", CASES)
def test_lines(pipe: Callable[..., Result], case: str) -> None:
    files, overrides, lines = read(CASES[case])
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    assert_refused(pipe("check", "r.yaml", *overrides), lines)


def test_references_that_double_with_every_line(pipe: Callable[..., Result]) -> None:
    doubled = "".join(f"    x{n}: ${{.x{n - 1}}}${{.x{n - 1}}}\n" for n in range(1, 31))
    Path("r.yaml").write_text(f"{GOOD}  last:\n    use: wrap.blue\n    x0: a\n{doubled}")
    unknown = "unknown field (known here: bucket)"
    lines = [f"r.yaml:{16 + n}:5: last.x{n}: {unknown}" for n in range(31)]
    most = "r.yaml:46:10: interpolations expand to more than 1000"
    assert_refused(pipe("check", "r.yaml"), [most, *lines])


BOMB = [f"  - &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"name: a\nstages: \xff\n", "2:9: byte 0xff is not UTF-8"),
        (b"#" * 1_000_001, " larger than 1000000 bytes"),
        (
            "\n".join(["name:", "  - &a0 [x]", *BOMB]).encode(),
            "6:5: holds more than 10000 values (aliases count in full)",
        ),
        (b"name: " + b"[" * 100_000, "1:70: nested deeper than 64 levels"),
    ],
    ids=["not UTF-8", "too large", "an alias bomb", "nesting without end"],
)
def test_limits(pipe: Callable[..., Result], content: bytes, line: str) -> None:
    Path("r.yaml").write_bytes(content)
    assert_refused(pipe("check", "r.yaml"), [f"r.yaml:{line}"])


def test_no_such_file(pipe: Callable[..., Result]) -> None:
    assert_refused(pipe("check", "r.yaml"), ["cannot read r.yaml: No such file or directory"])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("root:hunter2:19000:0:99999:7:::\nbin:hunter2:19000::::::\n", "1:1"),
        ("token: hunter2\n", "1:1"),
        ("hunter2\n", "1:1"),
        ("- token: !hunter2 x\n", "1:10"),
        ("token: &hunter2 [*hunter2]\n", "1:18"),
        ("hunter2: 1\nhunter2: 2\n", "2:1"),
        ('{"auths": "hunter2" "x"}\n', "1:21"),
    ],
)
def test_what_is_no_recipe_is_not_shown(pipe: Callable[..., Result], text: str, place: str) -> None:
    """A recipe from elsewhere can extend any file that its reader may read."""
    Path("r.yaml").write_text(f"extends: ./secret\n{GOOD}", encoding="utf-8")
    Path("secret").write_text(text, encoding="utf-8")
    line = f"secret:{place}: a recipe is a mapping with `name` and `stages` ({OTHER_TOOLS})"
    assert_refused(pipe("check", "r.yaml"), [line])


def test_the_good_recipe_is_good(pipe: Callable[..., Result]) -> None:
    Path("r.yaml").write_text(GOOD, encoding="utf-8")
    result = pipe("check", "r.yaml")
    assert result.exit_code == 0
    assert result.output == (
        "ok: good: 6 stages: model.fake -> data.text -> optimizer.adam -> wrap.red "
        "-> checkpoint.red -> train.lm\n"
    )


REAL = """\
name: real
stages:
  model: {use: model.hf, config: /nowhere}
  precision: {use: precision.policy, compute: bf32}
  optimizer: {use: optimizer.adamw, lr: 1e-4}
  wrap: {use: wrap.fsdp, shardin: no_shard}
  checkpoint: {use: checkpoint.deepspeed}
"""


def test_hints_name_every_installed_stage(
    fake_entry: Callable[..., Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("name: x\nstages: {wrap: {use: wrap.red}}\n", encoding="utf-8")
    names = {"wrap.red": "Red", "optimizer.adam": "Adam", "optimizer.broken": "Nothing"}
    entries = [fake_entry(name, kind, "theirs") for name, kind in names.items()]
    result = CliRunner().invoke(main, ["check", "r.yaml"], obj=Registry(entries))
    assert "needs a slot `optimizer` before it (add `optimizer: {use: optimizer.adam}`" in (
        result.stderr
    )


def test_the_built_in_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(REAL, encoding="utf-8")
    result = CliRunner().invoke(main, ["check", "r.yaml"])
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("r.yaml:3:34: model.config: ")
    assert lines[1].startswith("r.yaml:4:47: precision.compute: must be `fp32`, `bf16` or `fp16`")
    assert lines[2] == "r.yaml:6:26: wrap.shardin: unknown field (did you mean `sharding`?)"
    assert lines[3] == (
        "r.yaml:7:21: checkpoint.use: there is no stage `checkpoint.deepspeed` "
        "(did you mean `checkpoint.sharded`? "
        "checkpoint stages: checkpoint.full, checkpoint.sharded; or install its package into this "
        "environment)"
    )
