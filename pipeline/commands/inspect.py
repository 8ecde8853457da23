"""`pipe inspect`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pipeline.utils.terminal import bare
from pipeline.utils.text import human

if TYPE_CHECKING:
    from pipeline.checkpoint.reader import CheckpointReader
    from pipeline.checkpoint.store import Store


@click.command("inspect")
@click.argument("checkpoint")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--verify", is_flag=True, help="Read every byte; exit code 1 if one is wrong.")
def inspect(checkpoint: str, as_json: bool, verify: bool) -> None:
    """Show what is in CHECKPOINT: its folder or address, or a run, of which the newest is shown.

    Without --verify, the manifest is checked, and that every file is there and has its size.
    """
    from pipeline.checkpoint import summary
    from pipeline.run import rundir

    store, name = summary.find(checkpoint, rundir.RECIPE)
    everything = [] if name else summary.overview(store)
    aside = store.aside()
    if everything and not as_json:
        _show_all(everything, aside)
    told, damage = _look(store, name or everything[-1]["name"], verify, quiet=as_json)
    if as_json:
        verified = False if damage else True if verify else None
        facts = {"checkpoint": told, "verified": verified, "damage": damage}
        more = {"all": everything, "aside": list(aside)} if everything else {}
        click.echo(json.dumps(facts | more, indent=1))
    elif not damage:
        click.echo(f"{'verified':<10}  {_verdict(verify)}")
    if damage:
        click.echo(f"error: {damage}", err=True)
        sys.exit(1)


def _look(
    store: Store, name: str, every_byte: bool, *, quiet: bool
) -> tuple[dict[str, Any] | None, str | None]:
    """What is in it, if that can be read; what is wrong with it, if anything."""
    from pipeline.checkpoint import summary
    from pipeline.checkpoint.manifest import Damaged
    from pipeline.checkpoint.reader import CheckpointReader

    told = None
    try:
        with contextlib.closing(CheckpointReader(store, name)) as reader:
            told = summary.describe(reader)
            if not quiet:
                _show(told)
            if every_byte:
                _read(reader)
            else:
                reader.require_files()
    except Damaged as error:
        return told, str(error)
    return told, None


def _read(reader: CheckpointReader) -> None:
    from pipeline.checkpoint.summary import data_bytes

    watched = sys.stderr.isatty()
    with click.progressbar(
        length=data_bytes(reader), label="reading", file=bare(sys.stderr), hidden=not watched
    ) as bar:
        reader.verify(bar.update)


def _verdict(every_byte: bool) -> str:
    return "every byte is as it was written" if every_byte else "files and sizes only (--verify)"


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


def _show(told: Mapping[str, Any]) -> None:
    for name, text in _lines(told):
        click.echo(f"{name:<10}  {text}")


def _lines(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "checkpoint", told["where"]
    yield "step", str(told["step"])
    yield "written", told["written"]
    yield "by", f"{told['world_size']} process{'' if told['world_size'] == 1 else 'es'}"
    for name, facts in told["writer"].items():
        yield name, _pairs(facts) if isinstance(facts, Mapping) else str(facts)
    apart = ("metrics", "lineage", "origin", "step", "recent_losses", "best")
    progress = {
        k: v for k, v in told["progress"].items() if k not in apart and v not in ([], {}, "")
    }
    if progress:
        yield "position", _pairs(progress)
    if told["progress"].get("metrics"):
        yield "metrics", _pairs(told["progress"]["metrics"])
    if told["progress"].get("best"):
        yield "best so far", _pairs(told["progress"]["best"])
    for kind in told["tensors"]:
        yield (
            kind["kind"],
            f"{kind['tensors']} tensors  {kind['elements']:,} elements  "
            f"{human(kind['bytes'])}  {' '.join(kind['dtypes'])}",
        )
    if told["frozen"]:
        yield "frozen", f"{len(told['frozen'])} tensors"
    for alias, name in told["aliases"].items():
        yield "alias", f"{alias} is {name}"
    for number, group in enumerate(told["groups"]):
        parameters = len(group["parameters"])
        yield f"group {number}", f"{parameters} tensors  {_pairs(group['settings'])}"
    if told["loss_scale"] is not None:
        yield "loss scale", _pairs(told["loss_scale"])
    for file in told["files"]:
        yield "file", f"{file['name']}  {human(file['bytes'])}"
    yield "in all", human(told["bytes"])


def _pairs(facts: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in facts.items())
