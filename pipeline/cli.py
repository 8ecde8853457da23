"""The `pipe` command. Importing this imports click and nothing heavier.

Exit codes: 0 done, 1 a stage failed, 2 wrong usage or recipe, 3 an import left something out or a
plan does not fit, 4 a run differs from its plan, 5 training will fail on this machine (doctor),
75 a signal stopped a run and everything is saved, 128 + N signal N ended another command (130
SIGINT, 143 SIGTERM, 129 SIGHUP).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import tempfile
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click

from pipeline.errors import PipeError, UsageError, in_words, is_user_error
from pipeline.execution.rank_logging import LIBRARIES
from pipeline.utils.activities import Activity, show_in
from pipeline.utils.packages import RARELY
from pipeline.utils.terminal import bare, redact_output, shown
from pipeline.utils.text import duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

HEADINGS = {
    "Start": {
        "init": ("advise:init", "Write a recipe for a model and data."),
        "cp": ("recipes:cp", "Copy a shipped recipe."),
        "check": ("check:check", "Check a recipe for mistakes, without running it."),
        "plan": ("check:plan", "Predict memory, time and disk of a recipe."),
        "advise": ("advise:advise", "Find a strategy for a model on given GPUs."),
        "doctor": ("measure:doctor", "Measure this machine and list what will fail or be slow."),
        "import": ("recipes:import_", "Translate other tools' configuration files into a recipe."),
        "pin": ("recipes:pin", "Write the commits of hub models and data sets into a recipe."),
    },
    "Run": {
        "run": ("run:run", "Run all stages of a recipe."),
        "resume": ("run:resume", "Continue a run where it stopped."),
        "launch": ("launch:launch", "Print or submit the job script for a scheduler."),
        "profile": ("measure:profile", "Record a few steps and show where their time goes."),
        "bench": ("measure:bench", "Compare a recipe's speed under several strategies."),
    },
    "Look": {
        "ls": ("runs:ls", "List runs."),
        "status": ("runs:status", "Show the progress of a run."),
        "logs": ("runs:logs", "Print or follow the log of a rank."),
        "report": ("runs:report", "Write the report of a run, one HTML file."),
        "compare": ("runs:compare", "Compare the results, recipes and environments of runs."),
        "track": ("runs:track", "Send a run's remaining measurements to its trackers."),
        "inspect": ("checkpoints:inspect", "Show or verify the contents of a checkpoint."),
        "show": ("check:show", "Show a recipe with all values, or samples of its data."),
        "dag": ("check:dag", "Show which slots read each slot's result."),
        "clean": ("runs:clean", "List or remove files that are no longer needed."),
    },
    "Use the model": {
        "chat": ("chat:chat", "Chat with the model of a run."),
        "generate": ("chat:generate", "Answer one prompt with the model of a run."),
        "export": ("checkpoints:export", "Export the model of a run or of a checkpoint."),
        "verify": ("checkpoints:verify", "Verify that an export is undamaged and works."),
        "convert": ("checkpoints:convert", "Convert a training state to another format."),
    },
    "Extend": {
        "stages": ("stages:stages", "List the installed stages, or explain one."),
        "new-stage": ("stages:new_stage", "Write a plugin package with a working stage."),
        "schema": ("stages:schema", "Print the JSON Schema of recipes, for editors."),
        "completion": ("options:completion", "Print the shell code that completes commands."),
    },
}
"""Heading in `pipe --help` -> name -> module and function in `pipeline.commands`, and the line in
`pipe --help`."""
COMMANDS = {name: one for commands in HEADINGS.values() for name, one in commands.items()}
WORDS = "pipe.words"
"""Key of the command line's words after `pipe` in click's context."""


LINE_SECONDS = 10.0
"""Seconds between two lines about an activity where no bar can be drawn, and before the first."""
BAR_SECONDS = 0.5
"""Seconds after which an activity is worth a bar."""


class CommandActivities:
    """Shows activities on standard error: bars in a terminal, elsewhere a line now and then."""

    def __init__(self) -> None:
        self._bars: dict[Activity, TaskID] = {}
        self._progress: Progress | None = None
        self._said: dict[Activity, float] = {}

    def changed(self, activity: Activity) -> None:
        if not sys.stderr.isatty():
            last = self._said.setdefault(activity, activity.began)
            newest = activity is next(reversed(self._said))
            if newest and time.monotonic() - last >= LINE_SECONDS:
                self._said[activity] = time.monotonic()
                click.echo(activity.describe(), err=True)
            return
        if activity.seconds < BAR_SECONDS:
            return
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=30),
                TextColumn("{task.fields[amount]}"), TimeRemainingColumn(),
                console=Console(file=bare(sys.stderr), highlight=False), transient=True,
            )  # fmt: skip
            self._progress.start()
        if activity not in self._bars:
            name, total = shown(activity.name), activity.total
            self._bars[activity] = self._progress.add_task(name, total=total, amount="")
        amount = activity.amount if activity.done else ""
        if not amount and activity.total is None:
            amount = duration(activity.seconds)
        self._progress.update(self._bars[activity], completed=activity.done, amount=amount)

    def ended(self, activity: Activity) -> None:
        self._said.pop(activity, None)
        bar = self._bars.pop(activity, None)
        if bar is not None and self._progress is not None:
            self._progress.remove_task(bar)
            if not self._bars:
                self._progress.stop()
                self._progress = None

    def close(self) -> None:
        """Leave the terminal as it was, whatever is still shown."""
        if self._progress is not None:
            self._progress.stop()


class Commands(click.Group):
    """Imports a command's module when that command is used, and turns errors into messages."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        redact_output()
        gc.set_threshold(*RARELY)
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        found = getattr(importlib.import_module(f"pipeline.commands.{module}"), attribute)
        return cast(click.Command, found)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading, commands in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{n:<{width}}", line) for n, (_, line) in commands.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = [*args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from pipeline.usage import command_meant

            hint = command_meant(args[0], COMMANDS)
            raise click.UsageError(f"no command is called {args[0]} ({hint})", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with contextlib.closing(CommandActivities()) as place, show_in(place):
                return super().invoke(ctx)
        except PipeError as error:
            _leave(f"{error.prefix}{error}", error.exit_code)
        except KeyboardInterrupt:
            _leave("interrupted", 130)
        except click.MissingParameter as error:
            if error.param is None or error.param.name != "recipe":
                raise
            hint = "pipe init writes one, pipe cp copies one that is shipped"
            raise click.UsageError(f"name a recipe, a YAML file ({hint})", error.ctx) from error
        except click.NoSuchOption as error:
            from pipeline.usage import option_meant

            hint = option_meant(error, ctx.meta[WORDS])
            if not hint:
                raise
            message = f"there is no option {error.option_name} ({hint})"
            raise click.UsageError(message, error.ctx) from error
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if isinstance(error, PermissionError) and error.filename:
                _leave(f"error: {in_words(error)}", UsageError.exit_code)
            _leave(f"error: {in_words(error) if is_user_error(error) else _bug(error)}", 1)


def _bug(error: Exception) -> str:
    """Keep the traceback of a bug, of ours or of an installed plugin, in a file, and return a line
    that names it; raise the error with PIPE_DEBUG=1."""
    from pipeline.chain.registry import culprit, line_in

    if os.environ.get("PIPE_DEBUG") == "1":
        raise error
    with tempfile.NamedTemporaryFile(
        "w", prefix="pipe-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.writelines(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    stage = culprit(error)
    if stage is None:
        return f"a bug in pipe: {summary} (please report it with {file.name})"
    line = line_in(error, stage.value)
    bug = f"a bug in the stage {stage.name} of {stage}: {summary}, at {line}"
    return f"{bug} (report it to its authors with {file.name})"


def _leave(last_words: str, code: int) -> NoReturn:
    """End with this exit code, even where the message cannot be written."""
    try:
        click.echo(last_words, err=True)
    except OSError:  # a closed terminal; Python would try again at its end, and leave with 120
        os._exit(code)
    sys.exit(code)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pipetrain", prog_name="pipe")
def main() -> None:
    """Train a transformer from one recipe, with any parallelism strategy."""
    # with a handler of their own, logging does not print their messages where there is no log
    for library in map(logging.getLogger, LIBRARIES):
        if not library.handlers:
            library.addHandler(logging.NullHandler())
