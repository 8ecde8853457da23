"""`pipe check`, `pipe plan`, `pipe show` and `pipe dag`: recipes, without running them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pipeline.chain.elsewhere import explained
from pipeline.chain.plan import Plan, in_order, load_slots, unpinned
from pipeline.commands import options
from pipeline.commands.options import Count, flag, option
from pipeline.errors import (
    BadRows,
    DataError,
    NoFit,
    PipeError,
    Problem,
    RecipeError,
    StageError,
    UsageError,
    in_words,
    system_errors_as,
)
from pipeline.importing.translator import of_other_tools, plan_recipe
from pipeline.recipe import RecipeSettings, read_recipe, unless_reported
from pipeline.recipe.dump import render
from pipeline.recipe.fields import plain_value
from pipeline.recipe.load import HEADER_KEYS, reserved
from pipeline.recipe.nodes import leaves
from pipeline.utils import terminal
from pipeline.utils.files import check_writable
from pipeline.utils.terminal import bare
from pipeline.utils.text import align, plural

if TYPE_CHECKING:
    from pipeline.execution.in_process import Preview
    from pipeline.planning.search import Candidate


@click.command()
@options.recipe
@flag("--data", "with_data", "Also read and tokenise all rows, into the cache that a run uses.")
@options.as_json
@options.pinned
@options.trust
def check(recipe: Path, overrides: tuple[str, ...], with_data: bool, as_json: bool) -> None:
    """Check RECIPE for mistakes, without running it.

    OVERRIDES change the recipe first, such as train.steps=50 wrap.use=wrap.ddp. No weights are
    read.
    """
    try:
        plan = plan_recipe(recipe, overrides, registry=options.registry())
    except RecipeError as error:
        if not as_json:
            raise
        _fail({"ok": False, "problems": [*map(_facts, error.problems)]})
    notes = list(unpinned(plan.recipe, plan.view.slots))
    report: dict[str, object] = {
        "ok": True, "name": plan.recipe.name,
        "stages": [{"slot": planned.slot, "use": planned.use} for planned in plan.slots],
        "problems": [], "warnings": [*map(_facts, plan.warnings)], "notes": [*map(_facts, notes)],
    }  # fmt: skip
    log, lines = _DataLog(shown=not as_json), list[str]()
    said = [f"warning: {one}" for one in plan.warnings] + [f"note: {one}" for one in notes]
    for line in said if not as_json else ():
        click.echo(line, err=True)
    if with_data:
        try:
            data, lines = _read_data(plan, log)
        except StageError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error, DataError):
                raise  # of the machine
            if not as_json:
                raise UsageError(str(error)) from error
            _fail(_bad_data(error, log))
        report["data"] = data | {"warnings": log.warnings}
    chain = " -> ".join(planned.use for planned in plan.slots)
    ok = f"ok: {plan.recipe.name}: {plural(len(plan.slots), 'stage')}: {chain}"
    click.echo(json.dumps(report) if as_json else "\n".join([ok, *lines]))


def _fail(report: dict[str, object]) -> NoReturn:
    click.echo(json.dumps(report))
    sys.exit(UsageError.exit_code)


def _read_data(plan: Plan, log: _DataLog) -> tuple[dict[str, Any], list[str]]:
    """Return facts of the data for programs, and a line for people for each slot of data, once it
    has given a sample."""
    from pipeline.execution.in_process import previews

    with previews(plan, log.logger) as shown:
        for one in shown.values():
            one.indices(1)  # a stream is read only when it is asked
        facts = {slot: one.facts() for slot, one in shown.items()}
        several = len(shown) > 1
        data = next(iter(facts.values())) | ({"slots": facts} if several else {})
        names = shown if several else ["data"]
        summaries = (one.summary() for one in shown.values())
        return data, [f"{n}: {text}" for n, text in zip(names, summaries, strict=True)]


class _DataLog(logging.Handler):
    """Messages of the stages: on stderr if `shown`; the warnings are kept."""

    def __init__(self, *, shown: bool) -> None:
        super().__init__(logging.INFO)
        self.warnings: list[str] = []
        self._shown = shown
        self.logger = logging.Logger("pipe.check", logging.INFO)
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = terminal.shown(record.getMessage())
        warns = record.levelno >= logging.WARNING
        if warns:
            self.warnings.append(text)
        if self._shown:
            click.echo(f"warning: {text}" if warns else text, err=True)


def _bad_data(error: StageError, log: _DataLog) -> dict[str, object]:
    """Return what is wrong with the data: the first bad rows as problems, and counts by kind."""
    rows = error.rows if isinstance(error, BadRows) else ()
    if isinstance(error, DataError):
        rows = (error,)
    problems: list[dict[str, object]] = [
        {"file": one.file, "line": one.row, "column": None, "key": "data", "message": one.message,
         "hint": one.hint}
        for one in rows
    ] or [_facts(Problem(message=str(error), key="data"))]  # fmt: skip
    kinds = error.kinds if isinstance(error, BadRows) else {}
    return {"ok": False, "problems": problems, "kinds": kinds, "warnings": log.warnings}


def _facts(problem: Problem) -> dict[str, object]:
    place = problem.location
    line, column = (place.line, place.column) if place and place.line else (None, None)
    return {
        "file": place and place.file, "line": line, "column": column, "key": problem.key,
        "message": problem.message, "hint": problem.hint,
    }  # fmt: skip


@click.command()
@options.recipe
@options.machine
@flag("-q", "--quiet", "Print only whether it fits.")
@options.out("Plan to write, for `pipe run --plan`.")
@options.as_json
@options.pinned
@options.trust
def plan(
    recipe: Path, overrides: tuple[str, ...], quiet: bool, as_json: bool, out: Path | None,
    **hardware: Any,
) -> None:  # fmt: skip
    """Predict memory in every phase, disk, network and time of RECIPE.

    Runs each kind of block once on tensors without memory: needs no GPU, no weights, and no network
    except for the model's config, and for the commits of hub names that --out keeps in the plan.
    Exit code 3 if the recipe does not fit.

    OVERRIDES change the recipe first, such as train.micro_batch_size=2.
    """
    from pipeline.chain.plan import resolved
    from pipeline.distributed.signals import stoppable
    from pipeline.planning.memory_plan import check, estimate_plan
    from pipeline.planning.report import lines

    if quiet and as_json:
        raise click.UsageError("--quiet excludes --json")
    if quiet:
        terminal.shows = "quiet"
    machines, margins = options.machines(**hardware)
    with system_errors_as(UsageError):
        check_writable(out) if out else None
    registry = options.registry()
    with stoppable():
        checked = check(recipe, overrides, machines, registry)
        if out is not None:  # what is run under the plan names the same commits
            checked = resolved(checked, {})
        memory_plan = estimate_plan(checked, machines, margins)
    record = memory_plan.record() if out or as_json else {}
    if out is not None:
        with system_errors_as(UsageError):
            out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", "utf-8")
    if not as_json:
        shown = lines(memory_plan)
        click.echo(next(shown) if quiet else "\n".join(shown))
    found: list[Candidate] | None = []
    if memory_plan.short and not quiet:
        from pipeline.planning.search import SearchBase, remedies

        base = SearchBase(
            recipe=recipe, overrides=overrides, machines=machines, margins=margins,
            registry=registry,
        )  # fmt: skip
        try:
            found = [*remedies(memory_plan, base)]
        except PipeError as error:
            click.echo(f"no remedies can be found: {in_words(error)}", err=True)
            found = None
        if not as_json and found is not None:
            title = "it would fit with" if found else "nothing here makes it fit"
            click.echo("\n".join([title, *(f"  {way.line()}" for way in found)]))
    if as_json:
        ways = None if found is None else [way.record() for way in found]
        click.echo(json.dumps(record | {"remedies": ways}, allow_nan=False))
    if memory_plan.short:
        sys.exit(NoFit.exit_code)


@click.command()
@options.recipe
@flag("--origin", "Show the file and line that each value comes from.")
@option("--data", "count", "Show this many training samples instead, with trained tokens marked.",
        type=Count(min=1))  # fmt: skip
@options.as_json
def show(
    recipe: Path, overrides: tuple[str, ...], origin: bool, count: int | None, as_json: bool
) -> None:
    """Show RECIPE with all its values filled in, or samples of its data.

    RECIPE is a file, or the folder of a run. Includes what it extends, OVERRIDES, interpolations
    and defaults; values from the environment stay references. No weights are read.
    """
    file = recipe / "recipe.yaml" if recipe.is_dir() else recipe
    if count is not None:
        plan = plan_recipe(file, overrides, registry=options.registry())
        _show_data(plan, count=count, as_json=as_json)
        return
    registry = options.registry()
    loaded, problems = read_recipe(file, overrides, registry.common_fields)
    if loaded is None:
        raise RecipeError(in_order(problems))
    _, stages, more = load_slots(loaded, registry)
    problems += unless_reported(more, problems)
    if problems:
        raise RecipeError(in_order(explained(problems, loaded, registry, of_other_tools)))
    public = loaded.public()
    header = plain_value(RecipeSettings(**{key: getattr(loaded, key) for key in HEADER_KEYS}))
    written = public.get("stages") or {}
    slots = {
        slot: {**reserved(written[slot]), **_filled(plain_value(stage), written[slot])}
        for slot, stage in stages.items()
    }
    values = {**_filled(header, public), "stages": slots}
    if as_json:
        origins = {".".join(map(str, path)): loaded.origin(path) for path, _ in leaves(values)}
        shown = {"recipe": values, "origins": origins} if origin else values
        click.echo(json.dumps(shown, indent=2))
    else:
        click.echo(render(values, loaded.origin if origin else None), nl=False)


def _filled(values: Any, written: Any) -> Any:
    """Return `values`, which hold every default, with the recipe's own values as it writes them."""
    if not isinstance(values, dict) or not isinstance(written, dict):
        return written
    return {k: _filled(value, written[k]) if k in written else value for k, value in values.items()}


FIRST = 8
"""Values of a column that are shown."""
MARKS = "⟦", "⟧"
"""Marks around trained text on terminals without colours."""


def _show_data(plan: Plan, *, count: int, as_json: bool) -> None:
    """Print `count` samples of a recipe's training data, of each of several data slots, and the
    number of all samples. Messages of the stages go to stderr."""
    from pipeline.execution.in_process import previews

    log = logging.Logger("pipe.show", logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stderr))
    with previews(plan, log) as found:
        if as_json:
            facts = {slot: _as_json(one, count) for slot, one in found.items()}
            (only,) = facts.values() if len(facts) == 1 else ({"slots": facts},)
            click.echo(json.dumps(only, indent=1))
            return
        for slot, shown in found.items():
            click.echo(f"{slot}: {shown.summary()}" if len(found) > 1 else shown.summary())
            for place, index in enumerate(shown.indices(count)):
                # a stream's own index is not shown: it has no meaning for users
                number = place if shown.size is None else index
                text = "\n".join(_described(shown, index, number))
                click.echo(f"\n{text}", file=bare(sys.stdout))


def _described(shown: Preview, index: int, number: int) -> Iterator[str]:
    from pipeline.execution.in_process import documents

    sample = shown.data.train[index]
    parts = list(documents(sample))
    values = zip(*sample.rows.values(), strict=True)
    rows = [dict(zip(sample.rows, row, strict=True)) for row in values] or [{}] * len(parts)
    tokens, targets = plural(len(sample.input_ids), "token"), shown.data.train.targets(index)
    head = f"sample {number}: {tokens}, {targets} to predict"
    packed = sample.positions is not None
    yield f"{head}, {plural(len(parts), 'document')}" if packed else head
    for place, (part, row) in enumerate(zip(parts, rows, strict=True), 1):
        if packed:
            yield f"--- document {place} of {len(parts)}"
        text = ""  # runs of tokens that are trained on are coloured or marked
        for trained, run in groupby(part, key=lambda token: token.trained):
            words = terminal.shown(shown.tokenizer.decode([token.id for token in run]))
            if trained and sys.stdout.isatty():
                words = click.style(words, fg="green", bold=True)
            text += words.join(MARKS) if trained and not sys.stdout.isatty() else words
        yield text
        yield from _columns(row)
    yield from _columns({**sample.tokens, **sample.free})


def _columns(columns: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each column of the data: its first values, and how many there are."""
    for name, values in columns.items():
        flat = values.flatten().tolist() if values.ndim else [values.item()]
        shown = ", ".join(f"{one:.6g}" for one in flat[:FIRST])
        shape = f", ... ({' x '.join(map(str, values.shape))})" if len(flat) > FIRST else ""
        yield f"{name}: {shown}{shape}"


def _as_json(shown: Preview, count: int) -> dict[str, object]:
    indices = shown.indices(count)
    samples = (shown.data.train[index] for index in indices)
    facts = [
        {
            "place": place,
            "index": index,
            "input_ids": sample.input_ids.tolist(),
            "labels": sample.labels.tolist(),
            "positions": None if sample.positions is None else sample.positions.tolist(),
            **{name: one.tolist() for name, one in {**sample.tokens, **sample.rows}.items()},
            **{name: list(one.shape) for name, one in sample.free.items()},
        }
        for place, (index, sample) in enumerate(zip(indices, samples, strict=True))
    ]
    return {**shown.facts(), "shown": facts}


@click.command("dag")
@options.recipe
@flag("--mermaid", "Print a Mermaid diagram, for GitHub or mkdocs.")
@options.as_json
def dag(recipe: Path, overrides: tuple[str, ...], mermaid: bool, as_json: bool) -> None:
    """Show which slots of RECIPE read each slot's result.

    RECIPE is a file, or the folder of a run.
    """
    plan = plan_recipe(recipe / "recipe.yaml" if recipe.is_dir() else recipe, overrides)
    if mermaid and as_json:
        raise click.UsageError("--mermaid excludes --json")
    returns = {one.slot: one.gives.__name__ if one.gives else None for one in plan.slots}
    takes = {one.slot: dict(plan.recipe.stages[one.slot].takes) for one in plan.slots}
    if as_json:
        slots = [
            {"slot": one.slot, "use": one.use, "inputs": dict(one.inputs), "takes": takes[one.slot],
             "returns": returns[one.slot]}
            for one in plan.slots
        ]  # fmt: skip
        name = plan.recipe.name
        click.echo(json.dumps({"schema_version": 1, "name": name, "slots": slots}, indent=1))
    elif mermaid:
        click.echo("flowchart LR")
        for one in plan.slots:  # not all names are good for nodes: `end` is a keyword
            click.echo(f'  slot_{one.slot}["{one.slot}<br><small>{one.use}</small>"]')
        for one in plan.slots:
            for read in dict.fromkeys(filter(None, one.inputs.values())):
                click.echo(f"  slot_{read} -- {returns[read]} --> slot_{one.slot}")
    else:
        rows = [("slot", "stage", "reads", "returns")]
        for one in plan.slots:
            named = takes[one.slot]
            wires = [(name, slot) for name, slot in one.inputs.items() if slot is not None]
            reads = ", ".join(f"{name}: {slot}" if name in named else slot for name, slot in wires)
            rows.append((one.slot, one.use, reads, returns[one.slot] or ""))
        click.echo("\n".join(align(rows, left=4)))
