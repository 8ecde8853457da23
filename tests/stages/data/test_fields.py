"""Mistakes in fields that show without reading a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.testing import plan_view
from pipeline.testing import problems as recipe_problems
from stages.data.sources import Source
from stages.data.stages import ChatData, TextData

HUB = {"dataset": "owner/name", "revision": "0" * 40}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [("files", "no file is named")]),
        ({"files": ()}, [("files", "no file is named")]),
        ({"files": "no*.txt"}, [("files", "no such file: no*.txt")]),
        ({"files": "a.csv"}, [("files", "a.csv: unknown kind of file")]),
        ({"files": ("a.txt", "*.txt")}, [("files", "a.txt is named twice")]),
        ({"files": "a.txt", "heldout_files": "*.txt"},
         [("heldout_files", "a.txt is also trained on")]),
        ({"files": "a.txt", "heldout_files": "b.txt", "heldout_fraction": 0.1},
         [("heldout_fraction", "excludes `heldout_files`")]),
        ({"files": "a.txt", "sources": (Source(files="b.txt"),)},
         [("files", "excludes `sources`")]),
        ({"sources": (Source(),)}, [("sources.0.files", "no file is named")]),
        ({"sources": (Source(files="a.txt"), Source(files="*.txt"))},
         [("sources.1", "a.txt is in sources[0] already")]),
        ({"sources": (Source(files="a.txt", revision="main"),)},
         [("sources.0.revision", "`revision` is only for a hub `dataset`")]),
        ({"sources": (Source(files="a.txt", **HUB),)}, [("sources.0.files", "excludes `dataset`")]),
        ({"sources": (Source(dataset="./here", revision="0" * 40),)},
         [("sources.0.dataset", "'./here' is not a hub id (owner/name)")]),
        ({"sources": (Source(dataset="owner/name"),)}, []),
        ({"sources": (Source(dataset="owner/name", revision="a b"),)},
         [("sources.0.revision", "'a b' is not a commit, branch or tag")]),
        ({"sources": (Source(dataset="owner/name", revision="v1"),)}, []),
        ({"sources": (Source(**HUB),), "heldout_sources": (Source(**HUB),)},
         [("heldout_sources.0", "owner/name/train is also trained on")]),
        ({"sources": (Source(**HUB),), "heldout_sources": (Source(**HUB, split="test"),)}, []),
        ({"files": "a.txt", "heldout_files": "b.txt", "heldout_sources": (Source(**HUB),)},
         [("heldout_sources", "excludes `heldout_files`")]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", [ChatData, TextData])
def test_settings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: Any,
    fields: Any,
    expected: list[tuple[str, str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "a.csv"):
        Path(name).write_text("x")
    found = [(problem.key, problem.message) for problem in stage(**fields).check(plan_view())]
    assert found == expected


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf")])
def test_weights(weight: float) -> None:
    (problem,) = recipe_problems(ChatData, {"sources": [{"files": "a.txt", "weight": weight}]})
    assert problem.key == "sources.0.weight"
