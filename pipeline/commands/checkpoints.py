"""`pipe inspect`, `pipe convert`, `pipe export` and `pipe verify`."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands import options
from pipeline.commands.options import FOLDER, PATH, Count, flag, option
from pipeline.errors import CheckpointError, ExportError, StageError, UsageError, system_errors_as
from pipeline.execution.rank_logging import say
from pipeline.utils.activities import BYTES, activity
from pipeline.utils.files import replace_text
from pipeline.utils.foreign import TRUST_CODE, json_object, trusted
from pipeline.utils.terminal import bare
from pipeline.utils.text import human, plural

if TYPE_CHECKING:
    from pipeline.chain.plan import Plan
    from pipeline.checkpoint.location import Store
    from pipeline.checkpoint.manifest import TensorEntry
    from pipeline.checkpoint.reader import CheckpointReader
    from pipeline.distributed.settings import ProcessCounts
    from pipeline.view.screen import Display


@click.command("inspect")
@options.run("checkpoint", metavar="RUN|CHECKPOINT", address=True)
@flag("--verify", "Read and compare every byte; exit with 1 if one is wrong.")
@options.as_json
def inspect(checkpoint: str, as_json: bool, verify: bool) -> None:
    """Show the contents of CHECKPOINT, or of the newest checkpoint of RUN.

    CHECKPOINT is a folder or an address. RUN is by default the newest run in ./runs. Without
    --verify, only the manifest and the sizes of all files are checked.
    """
    from pipeline.checkpoint import location

    store, name = location.find(checkpoint)
    everything = [] if name else [_summary(store, name) for name in store.names()]
    aside = store.quarantined()
    if everything and not as_json:
        for place in location.earlier(checkpoint):
            click.echo(f"of the newest training; an earlier one's: pipe inspect {place}")
        best = min((s["eval_loss"] for s in everything if s["eval_loss"] is not None), default=None)
        for one in everything:
            loss = one["eval_loss"]
            size = "" if one["bytes"] is None else f"{human(one['bytes']):>9}"
            scored = "" if loss is None else f"eval_loss {loss:.4f}"
            mark = "best" if scored and loss == best else ""
            fields = (one["name"], one["written"], size, scored, mark, one["damage"])
            click.echo("  ".join(filter(None, fields)))
        click.echo("".join(f"{name}  damaged, kept aside\n" for name in aside))
    found, damage = _look(store, name or everything[-1]["name"], verify, quiet=as_json)
    if as_json:
        verified = False if damage else True if verify else None
        facts = {"checkpoint": found, "verified": verified, "damage": damage}
        more = {"all": everything, "aside": list(aside)} if everything else {}
        click.echo(json.dumps(facts | more, indent=1))
    elif not damage:
        extent = "every byte is correct" if verify else "files and sizes only (--verify)"
        click.echo(f"{'verified':<10}  {extent}")
    if damage:
        click.echo(f"error: {damage}", err=True)
        sys.exit(1)


def _summary(store: Store, name: str) -> dict[str, Any]:
    """Facts of one of several checkpoints; `damage` as far as it shows without reading data."""
    from pipeline.checkpoint.location import heldout_loss
    from pipeline.checkpoint.manifest import Damaged
    from pipeline.checkpoint.reader import CheckpointReader

    line = dict[str, Any](name=name, written=None, bytes=None, eval_loss=None, damage=None)
    try:
        reader = CheckpointReader(store, name)
        line["written"] = reader.manifest.written
        line["bytes"] = sum(file.size for file in reader.manifest.files)
        line["eval_loss"] = heldout_loss(reader.manifest)
        reader.require_files()
    except Damaged as error:
        line["damage"] = str(error)
    except CheckpointError as error:
        line["damage"] = f"not readable: {error}"
    return line


def _look(
    store: Store, name: str, every_byte: bool, *, quiet: bool
) -> tuple[dict[str, Any] | None, str | None]:
    """Facts of a checkpoint, if they can be read, and what is wrong with it, if anything."""
    from pipeline.checkpoint.manifest import Damaged
    from pipeline.checkpoint.reader import CheckpointReader

    found = None
    try:
        reader = CheckpointReader(store, name)
        found = _facts(reader)
        for title, text in () if quiet else _lines(found):
            click.echo(f"{title:<10}  {text}")
        if every_byte:
            file, hidden = bare(sys.stderr), not sys.stderr.isatty()
            with click.progressbar(length=reader.nbytes, file=file, hidden=hidden) as bar:
                reader.verify(bar.update)
        else:
            reader.require_files()
    except Damaged as error:
        return found, str(error)
    return found, None


def _facts(reader: CheckpointReader) -> dict[str, Any]:
    """The manifest's content, as JSON; tensors by the first part of their keys, in its order."""
    manifest = reader.manifest
    head = {"step", "written", "world_size", "writer", "progress", "state"}
    found = manifest.model_dump(include=head)
    state = found.pop("state")
    kinds: dict[str, list[TensorEntry]] = defaultdict(list)
    for tensor in manifest.tensors:
        kinds[tensor.key.partition("/")[0]].append(tensor)
    return {
        "where": reader.where,
        **found,
        "tensors": [
            {
                "kind": kind,
                "tensors": len(tensors),
                "elements": sum(tensor.numel for tensor in tensors),
                "bytes": sum(tensor.nbytes for tensor in tensors),
                "dtypes": list(dict.fromkeys(tensor.dtype for tensor in tensors)),
            }
            for kind, tensors in kinds.items()
        ],
        **{k: v for k, v in state.items() if k not in ("updates", "averages")},
        "files": [{"name": file.name, "bytes": file.size} for file in manifest.files],
        "bytes": sum(file.size for file in manifest.files),
    }


APART = ("metrics", "lineage", "origin", "step", "recent_losses", "best")
"""Entries of a checkpoint's progress that are shown elsewhere, or nowhere."""


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    progress = found["progress"]
    yield "checkpoint", found["where"]
    yield "step", str(found["step"])
    yield "written", found["written"]
    yield "by", plural(found["world_size"], "process")
    for name, facts in found["writer"].items():
        yield name, _pairs(facts) if isinstance(facts, Mapping) else str(facts)
    position = {k: v for k, v in progress.items() if k not in APART and v not in ([], {}, "")}
    for title, facts in (
        ("position", position),
        ("metrics", progress.get("metrics")),
        ("best so far", progress.get("best")),
    ):
        if facts:
            yield title, _pairs(facts)
    for kind in found["tensors"]:
        count, dtypes = plural(kind["tensors"], "tensor"), " ".join(kind["dtypes"])
        size = f"{kind['elements']:,} elements  {human(kind['bytes'])}"
        yield kind["kind"], f"{count}  {size}  {dtypes}"
    if found["frozen"]:
        yield "frozen", plural(len(found["frozen"]), "tensor")
    for alias, name in found["aliases"].items():
        yield "alias", f"{alias} is {name}"
    for number, group in enumerate(found["groups"]):
        parameters = plural(len(group["parameters"]), "tensor")
        yield f"group {number}", f"{parameters}  {_pairs(group['settings'])}"
    if found["loss_scale"] is not None:
        yield "loss scale", _pairs(found["loss_scale"])
    for file in found["files"]:
        yield "file", f"{file['name']}  {human(file['bytes'])}"
    yield "in all", human(found["bytes"])


def _pairs(facts: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in facts.items())


@click.command("convert")
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@option("--to", "Format of DST: canonical, full, deepspeed, dcp.", required=True, metavar="FORMAT")
@option("--from", "from_", "Format of SRC, if its files do not show it.", metavar="FORMAT")
@option("--samples", "Number of samples trained on, for formats that do not record it.",
        type=Count(min=0), default=0)  # fmt: skip
@flag("--weights-only", "Leave out the optimizer state.")
@options.trust
def convert(
    src: Path, dst: Path, to: str, from_: str | None, samples: int, weights_only: bool
) -> None:
    """Convert the training state in SRC to another format, in the folder DST.

    SRC is the folder of one checkpoint of this program, DeepSpeed, torch.distributed.checkpoint
    (torchtitan, accelerate) or transformers' Trainer. Runs in one process, with one chunk or
    tensor in memory at a time. Pickles are refused unless --trust-pickle is given.
    """
    from pipeline.checkpoint.formats import Formats, Reading, StateView
    from pipeline.contracts.training import Progress

    for path in (src, dst):
        if ":/" in str(path):
            raise UsageError(f"{path}: only folders can be converted, no addresses")
    formats = Formats.installed()
    writing = formats.get(to)
    reading = formats.get(from_) if from_ else formats.detect(src)
    with system_errors_as(StageError):
        source = reading.open(src, Reading(samples=samples, weights_only=weights_only))
        with contextlib.closing(source):
            if weights_only:
                source = StateView(source, weights_only=True)
            target = writing.target(dst, source.step)
            if target.exists():
                raise UsageError(f"{target} is there already", hint="give another folder")
            tensors, size = plural(len(source.tensors), "tensor"), human(source.nbytes)
            step = f"{source.where}: {reading.name}, step {source.step}"
            click.echo(f"{step}, {tensors}, {size}")
            if not Progress.from_record(source.progress).lineage:
                assumed = source.progress.get("samples", 0)
                click.echo(
                    "warning: it does not say on which model and data it was trained, so nothing "
                    f"will be compared; samples={assumed} is assumed (--samples)",
                    err=True,
                )
            with activity(f"converting to {writing.name}", source.nbytes, BYTES) as converting:
                notes = writing.write(StateView(source, converting.advance), target)
    click.echo(f"wrote {target}")
    for note in notes:
        click.echo(f"note: {note}", err=True)


@click.command("export")
@options.run("source", metavar="RUN|CHECKPOINT", address=True)
@option("--step",
        "Checkpoint of RUN to export: its step, or the one with the lowest held-out loss.",
        metavar="N|best", show_default="newest")  # fmt: skip
@options.out("Folder to write.", kind=FOLDER)
@option(
    "--model",
    "Take architecture and tokenizer from this model, not from the checkpoint's run: a folder "
    "in Hugging Face layout, a GGUF file, or a hub id (ID or ID@REVISION).",
)
@option("--dtype", "Dtype of the weights; source keeps the base model's.",
        type=click.Choice(["fp32", "bf16", "fp16", "source"]))  # fmt: skip
@option("--max-shard-size", "Size of the largest weight file, such as 5GB.")
@option("--procs", "Number of processes.", type=Count(min=1), show_default="up to 4")
@option("--accept", "Export even if the frozen weights of the model have changed since training.",
        type=click.Choice(["weights"]), multiple=True)  # fmt: skip
@options.display
@options.trust
def export(
    source: str, step: str | None, out: Path | None, model: str | None, procs: int | None,
    accept: tuple[str, ...], display: Display, **settings: Any,
) -> None:  # fmt: skip
    """Export the model of RUN, or of any CHECKPOINT, and verify the export.

    RUN is by default the newest run in ./runs. CHECKPOINT may come from this program, DeepSpeed,
    torch.distributed.checkpoint or transformers' Trainer. Needs no GPU and little memory. Repeat
    the command to continue an interrupted export.
    """
    from pipeline.chain.plan import plan_file
    from pipeline.execution import rundir
    from pipeline.execution.export_recipe import chosen, recipe_text
    from pipeline.hardware.host import cores_each
    from pipeline.launch.job import Job
    from pipeline.launch.start import start

    choose = functools.cache(lambda: chosen(source, step=step, model=model, to=out))

    @system_errors_as(UsageError)
    def plan(started: ProcessCounts) -> Plan:
        choice = choose()
        given = {key: value for key, value in settings.items() if value is not None}
        count = started.per_node or started.procs or procs or min(4, cores_each(1))
        choice.job.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Every stage runs again: the export itself finds out which of its files are finished.
        (choice.job / rundir.JOURNAL).unlink(missing_ok=True)
        file = choice.job / "export.yaml"
        replace_text(file, recipe_text(choice, given, count))
        made = plan_file(file, for_this_machine=True, started=started)
        say(f"{choice.checkpoint} -> {choice.folder}")
        return made

    start(Job(plan=plan, folder=lambda _: choose().job, display=display, accept=accept))


@click.command("verify")
@options.run("folder", metavar="RUN|EXPORT")
@options.trust_code
def verify(folder: Path) -> None:
    """Verify EXPORT, or the exports of RUN: nothing is damaged and the model computes the same.

    RUN is by default the newest run in ./runs. Reads and compares every byte, then loads the model
    with transformers and runs it on the prompt of its export. Exit code 1 if anything differs.
    """
    from pipeline.chain.registry import Registry
    from pipeline.contracts.export import EXPORT_MANIFEST, VERIFY, ExportedModel
    from pipeline.contracts.signature import gives
    from pipeline.execution import rundir
    from pipeline.execution.export_recipe import exports_of

    folder, registry = folder.resolve(), Registry.installed()
    is_run = (folder / rundir.RECIPE).is_file()
    for export in exports_of(folder) if is_run else [folder]:
        if not export.is_dir():
            raise UsageError(f"{export} is not there", hint="`pipe resume RUN` finishes a run")
        # the hub's cache holds links to files elsewhere; a run writes none
        within = export if is_run else None
        name = json_object(export / EXPORT_MANIFEST, most=1 << 28, within=within).get("writer")
        if not isinstance(name, str):
            raise UsageError(
                f"{export} is not an export of ours: it has no {EXPORT_MANIFEST} with its writer",
                hint="give a folder that `pipe export` or a run has written",
            )
        wrote = f"the stage {name}, which wrote {export},"
        if name not in registry:
            hint = "install its package into this environment"
            raise UsageError(f"{wrote} is not installed", hint=hint)
        stage = registry.load(name)
        if not issubclass(gives(stage) or object, ExportedModel) or not hasattr(stage, "verify"):
            raise UsageError(f"{wrote} cannot verify it", hint=f"its class lacks `{VERIFY}`")
        with system_errors_as(ExportError):
            stage.verify(export, click.echo, trust_remote_code=trusted(TRUST_CODE))
    click.echo("verified")
