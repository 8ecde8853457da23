"""`pipe` with a hub: a failed upload is repeated, a finished one is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.contracts.export import ExportedModel
from tests.stages.publish.conftest import REPO
from tests.stages.publish.hub_server import TOKEN, serving
from tests.support.pipe import Outcome, Pipe
from tests.support.plugins import install

READY = """
    import json
    from dataclasses import dataclass
    from pathlib import Path
    from pipeline.contracts.export import ExportedModel
    from pipeline.contracts.stage import Context

    @dataclass(frozen=True, kw_only=True)
    class Ready:
        '''Give a folder that was exported before.'''

        folder: str
        '''The folder.'''

        def run(self, ctx: Context) -> ExportedModel:
            folder = Path(self.folder)
            files = json.loads((folder / "export.json").read_text())["files"]
            return ExportedModel(folder=folder, files=files, total_bytes=10240)
"""


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    install(plugin, "ready", "ready", READY, {"export.ready": "Ready"})
    pipe = Pipe(plugin, tmp_path)
    for name in [name for name in pipe.environment if name.startswith(("HF_", "TRANSFORMERS_"))]:
        del pipe.environment[name]
    yield pipe
    assert pipe.processes() == []


def write_recipe(pipe: Pipe, folder: Path) -> Path:
    stages = {
        "export": {"use": "export.ready", "folder": str(folder)},
        "publish": {"use": "publish.hub", "repo": REPO},
    }
    launch = {"procs": 2, "device": "cpu"}
    path = pipe.folder / "recipe.yaml"
    path.write_text(json.dumps({"name": "tiny", "launch": launch, "stages": stages}))
    return path


def anew(pipe: Pipe, *arguments: str) -> Outcome:
    """Run `pipe ARGUMENTS` in a process that imports huggingface_hub under these settings."""
    return pipe.end(pipe.start("-m", "pipetrain", *arguments))


def test_an_upload_is_retried_and_then_not_made_again(pipe: Pipe, model: ExportedModel) -> None:
    recipe = write_recipe(pipe, model.folder)
    with serving() as hub:
        pipe.environment |= {
            "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(pipe.folder / "home"),
        }  # fmt: skip
        hub.refuse["/commit/"] = (403, f"{TOKEN} may not")
        failed = anew(pipe, "run", str(recipe), "--run-dir", str(pipe.run_dir))
        assert failed.code == 1
        assert "the token must be valid and allow to write" in failed.stderr
        hub.refuse.clear()
        resumed = anew(pipe, "resume", str(pipe.run_dir))
        assert resumed.code == 0, resumed.stderr
        assert len(hub.repos[REPO].commits) == 2
        hub.requests.clear()
        again = anew(pipe, "resume", str(pipe.run_dir))
        assert again.code == 0, again.stderr
        assert hub.requests == []
    said = "".join(each.stdout + each.stderr for each in (failed, resumed, again))
    written = [path for path in pipe.run_dir.rglob("*") if path.is_file()]
    assert TOKEN not in said
    assert {"journal.jsonl", "rank-00000.log"} <= {path.name for path in written}
    assert [path for path in written if TOKEN.encode() in path.read_bytes()] == []
    [record] = [
        event["record"]
        for event in pipe.events()
        if event["event"] == "slot finished" and event["slot"] == "publish"
    ]
    assert record["commit"] == hub.repos[REPO].branches["main"]
