"""`pipe check`, for programs. `pipe plan` is tested in tests/pipeline/planning."""

from __future__ import annotations

import json
from collections.abc import Callable

from click.testing import Result


def test_json(good: Callable[..., Result]) -> None:
    checked = good("check", "r.yaml", "--json")
    chain = {
        "model": "model.fake", "data": "data.text", "optimizer": "optimizer.adam",
        "wrap": "wrap.red", "train": "train.lm",
    }  # fmt: skip
    assert checked.exit_code == 0
    assert json.loads(checked.stdout) == {
        "ok": True, "name": "good", "problems": [], "warnings": [], "notes": [],
        "stages": [{"slot": slot, "use": use} for slot, use in chain.items()],
    }  # fmt: skip
    broken = good("check", "r.yaml", "--json", "model.layer=0")
    problem = {
        "file": "command line, override 1", "line": None, "column": None, "key": "model.layer",
        "message": "unknown field", "hint": "did you mean `layers`?",
    }  # fmt: skip
    assert broken.exit_code == 2
    assert json.loads(broken.stdout) == {"ok": False, "problems": [problem]}
