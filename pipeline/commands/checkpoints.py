"""`pipe inspect` and `pipe convert`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands import options
from pipeline.commands.options import PATH, Count, flag, option
from pipeline.errors import CheckpointError, StageError, UsageError, system_errors_as
from pipeline.utils.activities import BYTES, activity
from pipeline.utils.terminal import bare
from pipeline.utils.text import human, plural

if TYPE_CHECKING:
    from pipeline.checkpoint.formats import StateSource
    from pipeline.checkpoint.location import Store
    from pipeline.checkpoint.manifest import TensorEntry
    from pipeline.checkpoint.reader import CheckpointReader


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
        click.echo(
            "\n".join([*_list(everything), *(f"{a}  damaged, kept aside" for a in aside), ""])
        )
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


def _list(summaries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    best = min((s["eval_loss"] for s in summaries if s["eval_loss"] is not None), default=None)
    for one in summaries:
        loss = one["eval_loss"]
        size = "" if one["bytes"] is None else f"{human(one['bytes']):>9}"
        scored = "" if loss is None else f"eval_loss {loss:.4f}"
        mark = "best" if scored and loss == best else ""
        fields = (one["name"], one["written"], size, scored, mark, one["damage"])
        yield "  ".join(filter(None, fields))


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
            _announce(source, reading.name)
            with activity(f"converting to {writing.name}", source.nbytes, BYTES) as converting:
                notes = writing.write(StateView(source, converting.advance), target)
    click.echo(f"wrote {target}")
    for note in notes:
        click.echo(f"note: {note}", err=True)


def _announce(source: StateSource, name: str) -> None:
    from pipeline.contracts.training import Progress

    tensors, size = plural(len(source.tensors), "tensor"), human(source.nbytes)
    click.echo(f"{source.where}: {name}, step {source.step}, {tensors}, {size}")
    if not Progress.from_record(source.progress).lineage:
        click.echo(
            "warning: it does not say on which model and data it was trained, so nothing will be "
            f"compared; samples={source.progress.get('samples', 0)} is assumed (--samples)",
            err=True,
        )
