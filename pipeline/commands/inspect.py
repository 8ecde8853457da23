"""`pipe inspect`."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.options import json_option, run_argument
from pipeline.errors import CheckpointError
from pipeline.utils.terminal import bare
from pipeline.utils.text import human, plural

if TYPE_CHECKING:
    from pipeline.checkpoint.manifest import TensorEntry
    from pipeline.checkpoint.reader import CheckpointReader
    from pipeline.checkpoint.store import Store


@click.command("inspect")
@run_argument("checkpoint", metavar="RUN|CHECKPOINT", address=True)
@click.option(
    "--verify", is_flag=True, help="Read and compare every byte; exit with 1 if one is wrong."
)
@json_option
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
        _show_all(everything, aside)
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
    from pipeline.checkpoint.manifest import Damaged
    from pipeline.checkpoint.reader import CheckpointReader
    from pipeline.checkpoint.retention import heldout_loss

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
            with click.progressbar(
                length=reader.nbytes, file=bare(sys.stderr), hidden=not sys.stderr.isatty()
            ) as bar:
                reader.verify(bar.update)
        else:
            reader.require_files()
    except Damaged as error:
        return found, str(error)
    return found, None


def _facts(reader: CheckpointReader) -> dict[str, Any]:
    """The manifest's content, as JSON; tensors by the first part of their keys, in its order."""
    manifest = reader.manifest
    state = manifest.model_dump(include={"state"})["state"]
    kinds: dict[str, list[TensorEntry]] = defaultdict(list)
    for tensor in manifest.tensors:
        kinds[tensor.key.partition("/")[0]].append(tensor)
    return {
        "where": reader.where,
        "step": manifest.step,
        "written": manifest.written,
        "world_size": manifest.world_size,
        "writer": dict(manifest.writer),
        "progress": dict(manifest.progress),
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


def _show_all(lines: Sequence[Mapping[str, Any]], aside: Sequence[str]) -> None:
    known = [line["eval_loss"] for line in lines if line["eval_loss"] is not None]
    best = min(known, default=None)
    for line in lines:
        loss = "" if line["eval_loss"] is None else f"eval_loss {line['eval_loss']:.4f}"
        mark = "best" if loss and line["eval_loss"] == best else ""
        size = "" if line["bytes"] is None else f"{human(line['bytes']):>9}"
        fields = (line["name"], line["written"] or "", size, loss, mark, line["damage"] or "")
        click.echo("  ".join(field for field in fields if field))
    for place in aside:
        click.echo(f"{place}  damaged, kept aside")
    click.echo()


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "checkpoint", found["where"]
    yield "step", str(found["step"])
    yield "written", found["written"]
    yield "by", plural(found["world_size"], "process")
    for name, facts in found["writer"].items():
        yield name, _pairs(facts) if isinstance(facts, Mapping) else str(facts)
    apart = ("metrics", "lineage", "origin", "step", "recent_losses", "best")
    progress = {
        k: v for k, v in found["progress"].items() if k not in apart and v not in ([], {}, "")
    }
    if progress:
        yield "position", _pairs(progress)
    if found["progress"].get("metrics"):
        yield "metrics", _pairs(found["progress"]["metrics"])
    if found["progress"].get("best"):
        yield "best so far", _pairs(found["progress"]["best"])
    for kind in found["tensors"]:
        yield (
            kind["kind"],
            f"{plural(kind['tensors'], 'tensor')}  {kind['elements']:,} elements  "
            f"{human(kind['bytes'])}  {' '.join(kind['dtypes'])}",
        )
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
