"""Each broken recipe gives exactly these lines, exit code 2, and no traceback."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.chain.entry_points import Entry
from pipeline.chain.registry import Registry
from pipeline.cli import main
from pipeline.recipe.includes import OTHER_TOOLS

FAULTY = f"{Path(__file__).parents[1] / 'fake_stages.py'}:166"
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
DATA_FIELDS = "known here: files, length, note, split"


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


ONE_FILE: dict[str, tuple[str, tuple[str, ...], list[str]]] = {
    "misspelt key": (
        changed("name: good", "name: good\nseeed: 1"),
        (),
        ["r.yaml:2:1: seeed: unknown key (did you mean `seed`?)"],
    ),
    "slot outside of stages": (
        changed("name: good", "name: good\nexport: {use: model.fake}"),
        (),
        ["r.yaml:2:1: export: unknown key (slots belong under `stages`)"],
    ),
    "misspelt field": (
        changed("steps: 5", "stpes: 5"),
        (),
        [
            "r.yaml:13:5: train.stpes: unknown field (did you mean `steps`?)",
        ],
    ),
    "unlike any field": (
        changed("files: [a.txt]", "files: [a.txt]\n    zzz: 1"),
        (),
        [f"r.yaml:7:5: data.zzz: unknown field ({DATA_FIELDS})"],
    ),
    "misspelt field of a nested mapping": (
        changed("use: wrap.red", "use: wrap.red\n    offload: {devise: cpu}"),
        (),
        [
            "r.yaml:10:5: wrap.offload.device: is required",
            "r.yaml:10:15: wrap.offload.devise: unknown field (did you mean `device`?)",
        ],
    ),
    "wrong type": (
        changed("steps: 5", "steps: five"),
        (),
        ["r.yaml:13:12: train.steps: must be a whole number, not the text `five`"],
    ),
    "quoted number": (
        changed("steps: 5", 'steps: "5"'),
        (),
        ["r.yaml:13:12: train.steps: must be a whole number, not the text `5` (remove the quotes)"],
    ),
    "fraction for a whole number": (
        changed("steps: 5", "steps: 5.5"),
        (),
        ["r.yaml:13:12: train.steps: must be a whole number, not `5.5`"],
    ),
    "boolean for a number": (
        changed("steps: 5", "steps: true"),
        (),
        ["r.yaml:13:12: train.steps: must be a whole number, not `true`"],
    ),
    "number for text": (
        changed("[a.txt]", "[a.txt]\n    note: 3"),
        (),
        ['r.yaml:7:11: data.note: must be text, not `3` (write "3")'],
    ),
    "text for a list": (
        changed("[a.txt]", "a.txt"),
        (),
        [
            "r.yaml:6:12: data.files: must be a list, not the text `a.txt` (write `files: "
            "[a.txt]`)",
        ],
    ),
    "wrong type in a list": (
        changed("[a.txt]", "[a.txt, 3]"),
        (),
        ['r.yaml:6:20: data.files.1: must be text, not `3` (write "3")'],
    ),
    "out of range": (
        changed("steps: 5", "steps: 0"),
        (),
        ["r.yaml:13:12: train.steps: must be at least 1, not `0`"],
    ),
    "out of range in the head": (
        changed("name: good", "name: good\nseed: -1\nlaunch: {procs: 0}"),
        (),
        [
            "r.yaml:2:7: seed: must be at least 0, not `-1`",
            "r.yaml:3:17: launch.procs: must be at least 1, not `0`",
        ],
    ),
    "wrong name": (
        changed("name: good", "name: my run"),
        (),
        [
            "r.yaml:1:7: name: must match ^[A-Za-z0-9._-]+$, not the text `my run` (write my-run)",
        ],
    ),
    "no name": (changed("name: good\n", ""), (), ["r.yaml:1:1: name: is required"]),
    "wrong choice": (
        changed("[a.txt]", "[a.txt]\n    split: held-out"),
        (),
        [
            "r.yaml:7:12: data.split: must be `none` or `heldout`, not the text `held-out` "
            "(did you mean `heldout`?)"
        ],
    ),
    "wrong choice of number": (
        changed("use: wrap.red", "use: wrap.red\n    stage: 4"),
        (),
        ["r.yaml:10:12: wrap.stage: must be `1`, `2` or `3`, not `4`"],
    ),
    "neither choice nor mapping": (
        changed("use: wrap.red", "use: wrap.red\n    offload: nine"),
        (),
        [
            "r.yaml:10:14: wrap.offload: must be `none` or a mapping, not the text `nine` "
            "(did you mean `none`?)"
        ],
    ),
    "the dataclass itself objects": (
        changed("use: wrap.red", "use: wrap.red\n    offload: {device: nvme}"),
        (),
        ["r.yaml:10:14: wrap.offload: offloading to nvme needs `path`"],
    ),
    "missing slot": (
        changed("  optimizer: {use: optimizer.adam}\n", ""),
        (),
        [
            "r.yaml:8:10: wrap.use: `wrap.red` needs a slot `optimizer` before it (add "
            "`optimizer: {use: optimizer.adam}` before slot `wrap`)",
        ],
    ),
    "wrong order": (
        changed("  model: {use: model.fake}\n", "") + "  model: {use: model.fake}\n",
        (),
        [
            "r.yaml:4:10: data.use: `data.text` needs the result of slot `model`, which "
            "comes after it (move slot `model` (r.yaml:13:3) before `data`)",
            "r.yaml:6:20: optimizer.use: `optimizer.adam` needs the result of slot `model`,"
            " which comes after it (move slot `model` (r.yaml:13:3) before `optimizer`)",
            "r.yaml:8:10: wrap.use: `wrap.red` needs the result of slot `model`, which "
            "comes after it (move slot `model` (r.yaml:13:3) before `wrap`)",
        ],
    ),
    "mismatched wrap and checkpoint": (
        changed("checkpoint.red", "checkpoint.blue"),
        (),
        [
            "r.yaml:10:21: checkpoint.use: `checkpoint.blue` cannot use the result of slot "
            "`wrap` (wrap.red) (`checkpoint` can be checkpoint.red, or `wrap` can be wrap.blue)",
        ],
    ),
    "unknown stage": (
        changed("wrap.red", "wrap.rde"),
        (),
        [
            "r.yaml:9:10: wrap.use: there is no stage `wrap.rde` (did you mean `wrap.red`? "
            "wrap stages: wrap.blue, wrap.red; or install its package into this environment)"
        ],
    ),
    "stage without its kind": (
        changed("wrap.red", "blue"),
        (),
        [
            "r.yaml:9:10: wrap.use: there is no stage `blue` (did you mean `wrap.blue`?; or "
            "install its package into this environment)"
        ],
    ),
    "plugin that cannot be loaded": (
        GOOD + "  last: {use: broken.missing}\n",
        (),
        [
            "r.yaml:14:15: last.use: stage `broken.missing` of faulty-plugin 1.0 cannot be loaded: "
            "AttributeError: module 'fake_stages' has no attribute 'Nothing' "
            "(repair or uninstall faulty-plugin)"
        ],
    ),
    "plugin whose check fails": (
        GOOD + "  last: {use: broken.check}\n",
        (),
        [f"r.yaml:14:3: last: check of broken.check failed: KeyError: 'oops', at {FAULTY}"],
    ),
    "missing use": (
        changed("    use: wrap.red", "    stage: 2"),
        (),
        [
            "r.yaml:8:3: wrap.use: is missing (add `use: wrap.blue`, the stage's name; "
            "`pipe stages` lists all)",
        ],
    ),
    "use is no text": (
        changed("wrap.red", "[wrap.red]"),
        (),
        ["r.yaml:9:10: wrap.use: must be a stage's name (`pipe stages` lists them)"],
    ),
    "a slot that is only a name": (
        changed("model: {use: model.fake}", "model: model.fake"),
        (),
        [
            "r.yaml:3:10: model: a slot is a mapping with `use` and the stage's fields "
            "(write `model: {use: model.fake}`)"
        ],
    ),
    "a slot called as a key": (
        changed("  model:", "  seed:"),
        (),
        ["r.yaml:3:3: seed: a slot cannot be called `seed`: that is a key of the recipe itself"],
    ),
    "a slot with a capital": (
        changed("  model:", "  Model:"),
        (),
        [
            "r.yaml:3:3: Model: a slot's name is small letters, digits and underscores, "
            "and starts with a letter"
        ],
    ),
    "empty stages": (
        "name: a\nstages: {}\n",
        (),
        ["r.yaml:2:9: stages: a recipe needs at least one stage"],
    ),
    "stages as a list": (
        "name: a\nstages:\n  - use: model.fake\n",
        (),
        [
            "r.yaml:3:3: stages: must be a mapping of slots, each with `use` and the "
            "stage's fields (write a slot's name before each, without dashes: `model: {use:"
            " ..., ...}`)",
        ],
    ),
    "empty file": ("# nothing\n", (), ["r.yaml: the recipe is empty"]),
    "not a mapping": (
        "- 1\n",
        (),
        [
            "r.yaml:1:1: a recipe is a mapping with `name` and `stages` (pipe import "
            "translates files of the Trainer, TRL, axolotl, accelerate and DeepSpeed)",
        ],
    ),
    "missing file of a field": (
        changed("model.fake", "model.fake, path: /nowhere/model"),
        (),
        ["r.yaml:3:34: model.path: no such file: /nowhere/model"],
    ),
    "bad yaml": (
        changed("[a.txt]", "[a.txt"),
        (),
        [
            "r.yaml:6:12: the [ that opens here is not closed (add ])",
        ],
    ),
    "tab": (
        changed("    steps", "\tsteps"),
        (),
        ["r.yaml:13:1: a tab cannot be used here (use spaces)"],
    ),
    "control character": (
        changed("[a.txt]", "[a\x07.txt]"),
        (),
        ["r.yaml:6:14: the character U+0007 is not allowed"],
    ),
    "absurd escape": (
        changed("[a.txt]", '["\\UFFFFFFFF"]'),
        (),
        ["r.yaml:6:16: this is not a character or number that exists"],
    ),
    "python tag": (
        changed("steps: 5", "steps: !!python/object/apply:os.system [id]"),
        (),
        [
            "r.yaml:13:12: tags such as `tag:yaml.org,2002:python/object/apply:os.system` are not "
            "allowed (a recipe holds only text, numbers, true, false, null, lists and mappings)"
        ],
    ),
    "str tag": (
        changed("steps: 5", "steps: 5\n    shuffle: !!str x"),
        (),
        [
            "r.yaml:14:14: tags such as `tag:yaml.org,2002:str` are not "
            "allowed (a recipe holds only text, numbers, true, false, null, lists and mappings)",
        ],
    ),
    "duplicate key": (
        GOOD + "    steps: 6\n",
        (),
        ["r.yaml:14:5: `steps` is given twice (first on line 13)"],
    ),
    "merge key": (
        changed("steps: 5", "<<: {steps: 5}"),
        (),
        [
            "r.yaml:11:3: train.steps: is required",
            "r.yaml:13:5: merge keys (`<<`) are not allowed (use `extends`)",
        ],
    ),
    "second document": (
        GOOD + "---\nname: two\n",
        (),
        ["r.yaml:14:1: a second document starts here (one file, one recipe)"],
    ),
    "recursive alias": (
        changed("[a.txt]", "&files [*files]"),
        (),
        ["r.yaml:6:20: `*files` contains itself"],
    ),
    "unknown alias": (
        changed("a.txt", "*b"),
        (),
        [
            "r.yaml:6:13: nothing is anchored as `&b` above (put quotes around text that "
            'begins with *: "*b")',
        ],
    ),
    "a list as a key": (
        changed("steps: 5", "steps: 5\n    [a]: 1"),
        (),
        ["r.yaml:14:5: a key must be text (put quotes around text with { or [)"],
    ),
    "no as a boolean": (
        changed("steps: 5", "steps: 5\n    shuffle: no"),
        (),
        ["r.yaml:14:14: train.shuffle: must be true or false, not the text `no` (write false)"],
    ),
    "underscores in a number": (
        changed("steps: 5", "steps: 1_000"),
        (),
        ["r.yaml:13:12: train.steps: must be a whole number, not the text `1_000` (write 1000)"],
    ),
    "leading zeros": (
        changed("steps: 5", "steps: 007"),
        (),
        ["r.yaml:13:12: train.steps: must be a whole number, not the text `007` (write 7)"],
    ),
    "base 60": (
        changed("steps: 5", "steps: 12:30"),
        (),
        ["r.yaml:13:12: train.steps: must be a whole number, not the text `12:30`"],
    ),
    "infinity": (
        changed("optimizer.adam", "optimizer.adam, lr: .inf"),
        (),
        ["r.yaml:7:40: optimizer.lr: must be a number, not the text `.inf`"],
    ),
    "missing value": (
        changed("steps: 5", "steps: ???"),
        (),
        [
            "r.yaml:13:12: `???` stands for no value here (give one, or leave the key out)",
        ],
    ),
    "environment variable not listed": (
        changed("a.txt", "'${oc.env:HOME}'"),
        (),
        [
            "r.yaml:6:13: data.files.0: environment variable `HOME` is not in the recipe's "
            "`env` list (add `env: [HOME]` at the top)",
        ],
    ),
    "environment variable not set": (
        changed("name: good", "name: good\nenv: [NOT_SET_ANYWHERE]").replace(
            "a.txt", "'${oc.env:NOT_SET_ANYWHERE}'"
        ),
        (),
        [
            "r.yaml:7:13: data.files.0: environment variable `NOT_SET_ANYWHERE` is not set "
            "(a default reads ${oc.env:NOT_SET_ANYWHERE,value})"
        ],
    ),
    "wrong value from the environment": (
        changed("name: good", "name: good\nenv: [HOME]").replace(
            "[a.txt]", "[a.txt]\n    split: ${oc.env:HOME}"
        ),
        (),
        ["r.yaml:8:12: data.split: must be `none` or `heldout`, not the text `${oc.env:HOME}`"],
    ),
    "other resolver": (
        changed("a.txt", "'${oc.decode:x}'"),
        (),
        [
            "r.yaml:6:13: data.files.0: `oc.decode` is not allowed in an interpolation "
            "(only `oc.env` is)"
        ],
    ),
    "reference to nothing": (
        changed("steps: 5", "steps: ${stages.data.lenght}").replace(
            "[a.txt]", "[a.txt]\n    length: 8"
        ),
        (),
        [
            "r.yaml:14:12: train.steps: `${stages.data.lenght}` refers to nothing in this recipe "
            "(did you mean `stages.data.length`?)"
        ],
    ),
    "reference to itself": (
        changed("steps: 5", "steps: ${.steps}"),
        (),
        ["r.yaml:13:12: train.steps: the interpolation leads back to itself"],
    ),
    "a reference in a reference": (
        changed("steps: 5", "steps: ${stages.${name}}"),
        (),
        ["r.yaml:13:12: train.steps: a reference inside of a reference is not allowed"],
    ),
    "references that double with every line": (
        GOOD
        + "  last:\n    use: wrap.blue\n    x0: a\n"
        + "".join(f"    x{n}: ${{.x{n - 1}}}${{.x{n - 1}}}\n" for n in range(1, 31)),
        (),
        [
            "r.yaml:46:10: interpolations expand to more than 1000",
            *(
                f"r.yaml:{16 + n}:5: last.x{n}: unknown field (known here: bucket)"
                for n in range(31)
            ),
        ],
    ),
    "broken interpolation": (
        changed("steps: 5", "steps: ${"),
        (),
        ["r.yaml:13:12: train.steps: `${` is not a valid interpolation"],
    ),
    "override without =": (
        GOOD,
        ("train.steps",),
        [
            "command line, override 1: `train.steps`: an override reads path=value "
            "(such as train.steps=50)"
        ],
    ),
    "override with an empty part": (
        GOOD,
        ("train.steps=6", "a..b=1"),
        [
            "command line, override 2: `a..b=1`: the path before = has an empty part "
            "(such as train.steps=50)"
        ],
    ),
    "override of an unknown slot": (
        GOOD,
        ("trian.steps=1",),
        [
            "command line, override 1: `trian.steps=1`: the recipe has no slot `trian` "
            "(did you mean `train`?)"
        ],
    ),
    "override below stages": (
        GOOD,
        ("stages.train.steps=1",),
        [
            "command line, override 1: `stages.train.steps=1`: a path starts with the slot "
            "(write train.steps=...)"
        ],
    ),
    "override without a value": (
        GOOD,
        ("train.steps=",),
        [
            "command line, override 1: `train.steps=`: there is no value after = "
            "(write train.steps=null or train.steps=''; put quotes around text that starts with #)"
        ],
    ),
    "override with bad yaml": (
        GOOD,
        ("train.steps=[1",),
        [
            "command line, override 1: the [ that opens here is not closed (add ])",
        ],
    ),
    "override with a wrong type": (
        GOOD,
        ("train.steps=ten", "seed=no"),
        [
            "command line, override 1: train.steps: must be a whole number, not the text `ten`",
            "command line, override 2: seed: must be a whole number, not the text `no`",
        ],
    ),
    "override below a scalar": (
        GOOD,
        ("train.steps.more=1",),
        [
            "command line, override 1: `train.steps.more=1`: `train.steps` is one value, "
            "`5` (write train.steps=VALUE, or the name of another field)",
        ],
    ),
    "override of an entry that is not there": (
        GOOD,
        ("data.files.1=b.txt",),
        [
            "command line, override 1: `data.files.1=b.txt`: `1` is not an entry of a list of 1 "
            "(entries count from 0)"
        ],
    ),
    "many mistakes at once": (
        changed("name: good", "naem: good")
        .replace("[a.txt]", "3")
        .replace("checkpoint.red", "checkpoint.blue")
        .replace("steps: 5", "steps: 0"),
        ("wrap.stage=7",),
        [
            "command line, override 1: wrap.stage: must be `1`, `2` or `3`, not `7`",
            "r.yaml:1:1: naem: unknown key (did you mean `name`?)",
            "r.yaml:6:12: data.files: must be a list, not `3`",
            "r.yaml:10:21: checkpoint.use: `checkpoint.blue` cannot use the result of slot "
            "`wrap` (wrap.red) (`checkpoint` can be checkpoint.red, or `wrap` can be wrap.blue)",
            "r.yaml:13:12: train.steps: must be at least 1, not `0`",
        ],
    ),
}


def assert_refused(result: Result, lines: list[str]) -> None:
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert sorted(result.stderr.splitlines()) == sorted(lines)


@pytest.mark.parametrize("case", ONE_FILE)
def test_one_file(pipe: Callable[..., Result], case: str) -> None:
    text, overrides, lines = ONE_FILE[case]
    Path("r.yaml").write_text(text, encoding="utf-8")
    assert_refused(pipe("check", "r.yaml", *overrides), lines)


ONE_FILE["processes without end"] = (
    GOOD,
    ("launch.procs=100000000",),
    ["command line, override 1: launch.procs: must be at most 65536, not `100000000`"],
)
ONE_FILE["a node that is lost at once"] = (
    GOOD,
    ("launch.timeouts.node=1",),
    ["command line, override 1: launch.timeouts.node: must be at least 3.0, not `1`"],
)
FILES: dict[str, tuple[dict[str, str], list[str]]] = {
    "no such file": (
        {},
        [
            "cannot read r.yaml: No such file or directory",
        ],
    ),
    "extends a missing file": (
        {"r.yaml": "extends: [b.yaml]\n"},
        [
            "r.yaml:1:11: cannot read b.yaml: No such file or directory",
        ],
    ),
    "extends in a circle": (
        {
            "r.yaml": "extends: b.yaml\n",
            "b.yaml": "extends: c.yaml\n",
            "c.yaml": "name: c\nextends: b.yaml\n",
        },
        ["c.yaml:2:10: files extend each other in a circle: b.yaml -> c.yaml -> b.yaml"],
    ),
    "extends itself": (
        {"r.yaml": "extends: ./r.yaml\n"},
        ["r.yaml:1:10: files extend each other in a circle: r.yaml -> r.yaml"],
    ),
    "extends no text": (
        {"r.yaml": f"extends: [3]\n{GOOD}"},
        ["r.yaml:1:11: extends: must be a file name or a list of file names"],
    ),
    "mistake in an extended file": (
        {
            "r.yaml": "extends: base/b.yaml\nname: over\nstages:\n  train: {steps: 3}\n",
            "base/b.yaml": GOOD.replace("steps: 5", "steps: 5\n    shufle: true"),
        },
        ["base/b.yaml:14:5: train.shufle: unknown field (did you mean `shuffle`?)"],
    ),
    "mistake in an overlay": (
        {
            "r.yaml": "extends: b.yaml\nstages:\n  wrap: {use: wrap.blue, stage: 2}\n",
            "b.yaml": GOOD.replace("checkpoint.red", "checkpoint.blue"),
        },
        [
            "r.yaml:3:26: wrap.stage: unknown field (`stage` is a field of wrap.red)",
        ],
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_several_files(pipe: Callable[..., Result], case: str) -> None:
    files, lines = FILES[case]
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    assert_refused(pipe("check", "r.yaml"), lines)


def test_bytes_that_are_not_utf8(pipe: Callable[..., Result]) -> None:
    Path("r.yaml").write_bytes(b"name: a\nstages: \xff\n")
    assert_refused(pipe("check", "r.yaml"), ["r.yaml:2:9: byte 0xff is not UTF-8"])


def test_a_file_that_is_too_large(pipe: Callable[..., Result]) -> None:
    Path("r.yaml").write_text("#" * 1_000_001, encoding="utf-8")
    assert_refused(pipe("check", "r.yaml"), ["r.yaml: larger than 1000000 bytes"])


def test_an_alias_bomb(pipe: Callable[..., Result]) -> None:
    levels = [f"  - &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    Path("r.yaml").write_text("name:\n  - &a0 [x]\n" + "\n".join(levels), encoding="utf-8")
    place = "r.yaml:6:5"
    line = f"{place}: holds more than 10000 values (aliases count in full)"
    assert_refused(pipe("check", "r.yaml"), [line])


def test_nesting_without_end(pipe: Callable[..., Result]) -> None:
    Path("r.yaml").write_text("name: " + "[" * 100_000, encoding="utf-8")
    assert_refused(pipe("check", "r.yaml"), ["r.yaml:1:70: nested deeper than 64 levels"])


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


def test_what_a_recipe_does_not_say_cannot_be_referred_to(pipe: Callable[..., Result]) -> None:
    Path("r.yaml").write_text("extends: ./base\nseed: ${token}\n", encoding="utf-8")
    Path("base").write_text(f"token: hunter2\n{GOOD}", encoding="utf-8")
    known = "(known here: name, seed, launch, env, dry_run, extends, stages)"
    lines = [
        f"base:1:1: token: unknown key {known}",
        "r.yaml:2:7: seed: `${token}` refers to nothing in this recipe",
    ]
    assert_refused(pipe("check", "r.yaml"), lines)


def test_the_good_recipe_is_good(pipe: Callable[..., Result]) -> None:
    Path("r.yaml").write_text(textwrap.dedent(GOOD), encoding="utf-8")
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
