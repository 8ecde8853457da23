"""`pipe` with a hub: a failed upload is made up for, a finished one is not made again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.contracts.export import ExportedModel
from pipeline.distributed.process_group import DistContext
from pipeline.testing import context
from stages.publish.hub import PublishHub
from tests.stages.publish.exported import REPO, TOKEN
from tests.stages.publish.hub_server import Hub, serving
from tests.support.pipe import Outcome, Pipe
from tests.support.plugins import install
from tests.support.processes import run_ranks

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
    """`pipe ARGUMENTS` in a process that huggingface_hub is imported in under these settings."""
    return pipe.end(pipe.start("-m", "pipetrain", *arguments))


def test_an_upload_is_retried_and_then_not_made_again(pipe: Pipe, model: ExportedModel) -> None:
    recipe = write_recipe(pipe, model.folder)
    with serving(Hub(TOKEN)) as hub:
        pipe.environment |= {
            "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(pipe.folder / "home"),
        }  # fmt: skip
        hub.refuse["/commit/"] = (403, f"{TOKEN} may not")
        failed = anew(pipe, "run", str(recipe), "--run-dir", str(pipe.run_dir))
        assert failed.code == 1
        assert "the token in $HF_TOKEN must be valid and allow to write" in failed.stderr
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


def publish_on_rank(dist: DistContext, folder: str) -> dict[str, object]:
    ctx = dataclasses.replace(context(Path(folder).parent / "run"), dist=dist)
    files = json.loads((Path(folder) / "export.json").read_text())["files"]
    model = ExportedModel(folder=Path(folder), files=files, total_bytes=10240)
    if not dist.is_main:
        model = dataclasses.replace(model, folder=Path("not on this machine"))
    return PublishHub(repo=REPO, dry_run=True).run(ctx, model).record()


def test_ranks_agree_and_only_rank_0_looks(model: ExportedModel) -> None:
    first, second = run_ranks(publish_on_rank, 2, str(model.folder))
    assert first == second == {"repo": REPO, "commit": None, "url": None}
