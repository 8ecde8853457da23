"""A run by its folder: while it continues, all that the folder says of it, and its last lines."""

from __future__ import annotations

import heapq
import itertools
import operator
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.chain.artifacts import trains
from pipeline.chain.registry import Registry
from pipeline.contracts.metrics import is_record, records
from pipeline.contracts.stage import ENVIRONMENT_FILE, engine_file
from pipeline.errors import RecipeError
from pipeline.execution import failures, rundir
from pipeline.execution.journal import Journal, is_event
from pipeline.execution.rank_logging import ACTIVITY_FILE
from pipeline.execution.run_state import ENDS, RunState, SlotState, Training
from pipeline.recipe import Recipe, read_recipe
from pipeline.utils.foreign import Tail, fitting, is_number, is_text, json_object
from pipeline.utils.terminal import shown
from pipeline.utils.text import count, held_out, plural, shown_path

Ended = Literal["running", "finished", "failed", "stopped"]
LOOK_SECONDS = 0.5
"""Seconds between two looks at the folder of a run that is followed."""
KEPT = 1000
"""Newest records of a training that are kept of a run that is followed."""
NEWEST_BYTES = 1 << 20
"""Bytes of `metrics.jsonl` that are read of a run that began earlier."""
PACES = 20
"""Newest steps over whose time a mean is taken."""
Kinds = Mapping[str, Callable[[Any], bool]]
SURROUNDINGS: Kinds = {
    "command": lambda value: isinstance(value, list),
    "packages": lambda value: isinstance(value, dict),
}
PLANNED: Kinds = {"needed_bytes": is_number, "lines": lambda value: isinstance(value, list)}
DOING: Kinds = {
    "name": is_text,
    "unit": is_text,
    "done": is_number,
    "seconds": is_number,
    "total": lambda value: value is None or is_number(value),
}


def json_in(file: Path, kinds: Kinds) -> dict[str, Any]:
    """The JSON object in a file, without entries of `kinds` that are of another kind; an empty one
    where there is none."""
    return fitting(json_object(file, within=file.parent), kinds)


class Run:
    """A run as it is now; `look` brings it up to date."""

    def __init__(self, folder: Path, uses: Mapping[str, str]) -> None:
        """`uses` has the name of each slot's stage, in order."""
        self.folder, self.uses = folder, uses
        self.now = RunState(KEPT)
        self._journal = Tail(folder / rundir.JOURNAL)
        self._metrics = Tail(folder / rundir.METRICS, newest_bytes=NEWEST_BYTES)

    def look(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
        """Read what is new. Returns events, records, and whether the records begin with earlier
        ones: from earlier starts, or returned before."""
        events = [event for event in self._journal.read() if is_event(event)]
        first = not self._metrics.began
        found = [record for record in self._metrics.read() if is_record(record)]
        if self._metrics.replaced:  # a resumed run has dropped steps that it repeats
            self.now.trainings.clear()
        self._apply(events, found)
        return events, found, first or self._metrics.replaced

    def _apply(self, events: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> None:
        """Apply all by time; one without a time follows the one before it."""
        timed = []
        for rows in (events, found):
            times = (float(one.get("time") or 0) for one in rows)
            timed.append(zip(itertools.accumulate(times, max), rows, strict=True))
        for _, one in heapq.merge(*timed, key=operator.itemgetter(0)):
            self.now.apply(one)
        if self.state != "running":
            self.now.end_silently()

    @property
    def slots(self) -> dict[str, SlotState]:
        """The recipe's slots, in order."""
        return {slot: self.now.slots.get(slot, SlotState()) for slot in self.uses}

    @property
    def running(self) -> str | None:
        """The slot that is running, if one is."""
        return next((slot for slot, one in self.slots.items() if one.state == "running"), None)

    @property
    def training(self) -> Training:
        """The newest training."""
        return next(reversed(self.now.trainings.values()), Training())

    @property
    def whole(self) -> bool:
        """Whether all records were read: of a run that began earlier, only the newest are."""
        return self._metrics.whole

    @property
    def state(self) -> Ended:
        """Whether the run is under way, and how it ended if not."""
        return "running" if rundir.is_locked(self.folder) else ended(self.folder, self.now)

    def activity(self) -> dict[str, Any]:
        """The activity of rank 0: `name`, `done`, `total`, `unit`, `seconds`; empty if it has not
        said so, or if the run is not under way: a killed rank leaves its file there."""
        if self.state != "running":
            return {}
        found = json_in(self.folder / ACTIVITY_FILE, DOING)
        return found if found.keys() >= DOING.keys() else {}

    @property
    def seconds(self) -> float:
        """Seconds of the newest start of the run, so far or to its end."""
        started = self.now.started
        return max(0.0, (self.now.ended or time.time()) - started) if started else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step at the mean speed of the newest steps; None if not known, or
        if the training has ended."""
        step = self.training.step
        if self.training.ended_early or self.state == "finished" or "total_steps" not in step:
            return None
        paces = [one["step_seconds"] for one in self.training.steps if one.get("step_seconds")]
        left = step["total_steps"] - step["step"]
        return float(left * statistics.fmean(paces[-PACES:])) if paces else None


def ended(folder: Path, state: RunState) -> Ended:
    """How a run that is not under way has ended."""
    newest = state.events[-1]["event"] if state.events else None
    if newest == "run finished":
        return "finished"
    # under another launcher, rank 0 may be stopped before it can say that another one failed
    failed = newest == "run failed" or failures.in_force(folder)
    return "failed" if failed else "stopped"


class History(Run):
    """All that a run's folder says of it: for reports, comparisons and other programs."""

    def __init__(self, folder: Path, *, ended: bool = False) -> None:
        """Read the folder; with `ended` it is known that nothing continues there. Raises UsageError
        if it holds no run, RecipeError if its recipe cannot be read, and JournalDamaged."""
        self.recipe = recipe_in(folder)
        super().__init__(folder, self.recipe.uses)
        self._over, self.now = ended, RunState()
        events = Journal(folder / rundir.JOURNAL).events()
        self._apply(events, list(records(folder / rundir.METRICS)))
        self.environment: Mapping[str, Any] = json_in(folder / ENVIRONMENT_FILE, SURROUNDINGS)
        """Packages and machine of the newest start; empty if not known."""
        self.engines: Mapping[str, Mapping[str, Any]] = {
            slot: json_in(folder / engine_file(slot), {})
            for slot in ("", *self.recipe.stages)
            if (folder / engine_file(slot)).is_file()
        }
        """Facts of the live engine of each training that has begun, by its slot (empty: the
        recipe's first)."""
        found = self.now.trainings
        self.trainings = [found.get("", Training())]
        """The trainings that have begun, in order; at least one. Several have their slots as
        labels."""
        if not found.keys() <= {""}:
            first, *others = slots_that_train(self.uses) or ("the first training",)
            for key, training in found.items():
                training.label = key or first
            keys = dict.fromkeys(["", *others, *found])
            self.trainings = [found[key] for key in keys if key in found]

    @property
    def state(self) -> Ended:
        return ended(self.folder, self.now) if self._over else super().state

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.folder.resolve().name

    @property
    def events(self) -> list[dict[str, Any]]:
        """Lines of the journal that count, in order; a start that was killed has an end too."""
        return self.now.events

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Events of the run's starts."""
        return [event for event in self.events if event["event"] == "run started"]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Records of `metrics.jsonl`, training by training."""
        return [record for one in self.trainings for record in one.records]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Records of steps, of the newest training."""
        return self.trainings[-1].steps

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Records of evaluations, of the newest training."""
        return self.trainings[-1].evaluations

    @property
    def best(self) -> dict[str, Any] | None:
        """Lowest held-out loss of the newest training, `eval_loss`, and its `step`, if any."""
        return self.trainings[-1].best

    @property
    def busy_seconds(self) -> float:
        """Seconds that all starts of the run took together."""
        total, began = 0.0, None
        for event in self.events:
            if event["event"] == "run started":
                began = event["time"]
            elif event["event"] in ENDS and began is not None:
                total, began = total + event["time"] - began, None
        if began is not None and self.state == "running":
            total += max(0.0, time.time() - began)
        return total

    @property
    def where(self) -> str:
        """Strategy of each training, processes and device: `fully_shard, 8 processes, cuda`."""
        newest = self.starts[-1] if self.starts else {}
        engines = [*self.engines.values()]
        kinds = " then ".join(dict.fromkeys(str(one.get("engine", "")) for one in engines))
        procs = plural(newest["procs"], "process") if "procs" in newest else ""
        device = next((str(one["device"]) for one in engines if "device" in one), "")
        return ", ".join(filter(None, (kinds, procs, device or str(newest.get("device", "")))))


def recipe_in(folder: Path) -> Recipe:
    """The recipe of the run in a folder, also where variables that it names are not set. Raises
    UsageError if it holds no run, and RecipeError if the recipe cannot be read."""
    recipe, problems = read_recipe(rundir.existing(folder) / rundir.RECIPE)
    if recipe is None:
        raise RecipeError(problems)
    return recipe


def slots_that_train(uses: Mapping[str, str]) -> list[str]:
    """The slots that train, of slots with the names of their stages, without those whose stage is
    not installed here."""
    registry = Registry.installed()
    return [slot for slot, use in uses.items() if trains(registry.find(use))]


REPORT = "report.html"
"""File of the report in a run's folder."""
MOST_PROMPTS = 3
MOST_LETTERS = 200
"""Prompts, and letters of a text, in the last lines of a run."""
MOST_IN_REPORT = 40
MOST_ANSWERS = 20
"""Prompts in a report, and answers to a prompt there: the first, and the newest."""


def outcome(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of what each training of a run measured: steps and mean speed, the
    reason of an early end, the first and the last held-out loss, plugins' numbers, and answers
    before and after training. Raises what `History` raises, and OSError."""
    for training in History(folder, ended=True).trainings:
        if step := training.step:
            rate, total = training.speed.mean("tokens_per_second"), step.get("total_steps")
            mean = "" if rate is None else f", {count(rate)} tokens/s (mean)"
            of_all = f" of {total}" if total and total > step["step"] else ""
            yield training.named("steps"), f"{step['step']}{of_all}{mean}"
        if training.ended_early:
            yield training.named("ended early"), shown(training.ended_early)
        if text := held_out(training.evaluations, training.best):
            yield training.named("held-out loss"), text
        for name, values in training.measured.items():
            number, value = values[-1]
            yield training.named(name), f"{value:.4g} at step {number}"
        for label, text in before_and_after(training.records):
            yield training.named(label), text


def next_lines(folder: Path, state: str) -> list[tuple[str, str]]:
    """Return labels with the files to look at and the commands to call after a run has ended; none
    while it is running."""
    from pipeline.execution.talk import can_talk

    if state == "running":
        return []
    run, report = shown_path(folder), folder / REPORT
    lines = [("report", shown_path(report))] if report.is_file() else []
    if state != "finished":
        lines.append(("continue", f"pipe resume {shlex.quote(run)}"))
    if can_talk(folder):
        lines.append(("talk to it", f"pipe chat {shlex.quote(run)}"))
    return lines


def by_prompt(found: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], dict[int, str]]:
    """Return number and text of each prompt of a run's records -> step -> answer. Of two answers of
    the same step, the later counts."""
    answers: dict[tuple[int, str], dict[int, str]] = {}
    for record in found:
        for one in record.get("generated", ()):
            by_step = answers.setdefault((one["number"], one["prompt"]), {})
            by_step[record["step"]] = one["text"]
    return answers


def before_and_after(found: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: each of the first prompts, and its answers before training and by the
    last step, from a run's metrics. Nothing without texts before the first step."""
    answers = by_prompt(found)
    last = max(itertools.chain(*answers.values()), default=0)
    both = (item for item in answers.items() if last and {0, last} <= item[1].keys())
    for (_, prompt), by_step in itertools.islice(both, MOST_PROMPTS):
        for label, text in (
            ("prompt", prompt),
            ("  before", by_step[0]),
            ("  after", by_step[last]),
        ):
            line = " ".join(text.split()) or "(empty answer)"
            cut = f"{line[:MOST_LETTERS].rstrip()} ..." if len(line) > MOST_LETTERS else line
            yield label, cut


def prompts(records: Iterable[Mapping[str, Any]], slot: str = "") -> list[dict[str, Any]]:
    """Return the newest prompts of a training's records for a report: `text`, the first and the
    last answer (`shown`), others (`between`), and how many were `left_out`. An answer has `when` it
    was written and its `text`, empty where it is white space; `slot` is the training's, if the run
    has others."""

    def answer(step: int, text: str) -> dict[str, str]:
        when = f"{slot} step {step}".strip() if step else f"before {slot or 'training'}"
        return {"when": when, "text": shown(text) if text.strip() else ""}

    found = []
    for (_, text), by_step in list(by_prompt(records).items())[-MOST_IN_REPORT:]:
        first, *rest = (answer(step, by_step[step]) for step in sorted(by_step))
        kept = rest[max(0, len(rest) - MOST_ANSWERS + 1) :]
        ends, left_out = [first, *kept[-1:]], len(rest) - len(kept)
        found.append(
            {"text": shown(text), "shown": ends, "between": kept[:-1], "left_out": left_out}
        )
    return found
