"""The `pipe` command. Importing this imports click and nothing heavier.

Exit codes: 0 done, 1 a stage failed, 2 wrong usage or recipe, 3 an import left something out or a
plan does not fit, 4 a run is not what was planned, 5 training will fail on this machine (doctor),
75 a run was stopped by a signal with everything saved, 128 + N another command after signal N (130
SIGINT, 143 SIGTERM, 129 SIGHUP).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import traceback
from typing import Any, NoReturn

import click

from pipeline.errors import PipeError, RecipeError, in_words, is_expected
from pipeline.execution.rank_logging import hush_asides
from pipeline.utils.activities import show_in
from pipeline.utils.garbage import collect_rarely
from pipeline.utils.terminal import guard
from pipeline.view.terminal_activity import CommandActivities

COMMANDS = {
    "run": ("run:run", "Run a recipe's stages, in order."),
    "resume": ("run:resume", "Continue a run where it stopped."),
    "launch": ("launch:launch", "Write or submit the script with which a scheduler runs a recipe."),
    "profile": ("profile:profile", "Record a few steps, and say what their time went to."),
    "bench": ("bench:bench", "Measure a recipe under several strategies and process counts."),
    "ls": ("ls:ls", "List runs."),
    "clean": ("clean:clean", "List or remove what runs have on disk that nobody needs."),
    "status": ("status:status", "Show where a run is, from any terminal."),
    "logs": ("status:logs", "Print or follow the log of a rank."),
    "report": ("report:report", "Write a run's report, one HTML file."),
    "track": ("track:track", "Send a run's measurements to its trackers."),
    "compare": ("report:compare", "Compare runs: results, recipes, environments, curves."),
    "inspect": ("inspect:inspect", "Show what is in a checkpoint; verify it."),
    "convert": ("convert:convert", "Convert a training state to another tool's format, or back."),
    "chat": ("chat:chat", "Talk to a run's model."),
    "generate": ("chat:generate", "Answer one prompt with a run's model."),
    "export": ("export:export", "Export a run's model, or a checkpoint's."),
    "verify": ("verify:verify", "Verify that an export is unchanged and works."),
    "import": ("import_:import_", "Turn other tools' configuration files into a recipe."),
    "doctor": ("doctor:doctor", "Measure this machine, and find what will fail or be slow."),
    "check": ("check:check", "Find every mistake in a recipe before running."),
    "pin": ("pin:pin", "Write the commits of hub models and data sets into a recipe."),
    "plan": ("plan:plan", "Predict what a recipe will need, and whether it fits."),
    "init": ("init:init", "Write a recipe for a model and data, asking what it needs."),
    "cp": ("cp:cp", "Copy a shipped recipe."),
    "advise": ("advise:advise", "Find how to train a model on given GPUs; write its recipe."),
    "dag": ("dag:dag", "Show which slot reads the result of which."),
    "show": ("show:show", "Show a recipe as it would run."),
    "stages": ("stages:stages", "List the installed stages, or explain one."),
    "new-stage": ("new_stage:new_stage", "Write a plugin package with a stage that works."),
    "completion": ("completion:completion", "Print what makes a shell complete pipe."),
    "schema": ("stages:schema", "Print the JSON Schema of recipes, for editors."),
}
"""Name -> module and function in `pipeline.commands`, and the line in `pipe --help`."""


class Commands(click.Group):
    """Imports a command's module when that command is used, and turns errors into messages."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        guard()
        collect_rarely()
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(
            importlib.import_module(f"pipeline.commands.{module}"), attribute
        )
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_) for name, (_, help_) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with contextlib.closing(CommandActivities()) as place, show_in(place):
                return super().invoke(ctx)
        except PipeError as error:
            prefix = "" if isinstance(error, RecipeError) else "error: "
            _leave(f"{prefix}{error}", error.exit_code)
        except KeyboardInterrupt:
            _leave("interrupted", 130)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if not is_expected(error):
                _give_up(error)
            click.echo(f"error: {in_words(error)}", err=True)
            sys.exit(1)


def _give_up(error: Exception) -> NoReturn:
    """Report a bug of ours: one line and a file, or the traceback with PIPE_DEBUG=1."""
    if os.environ.get("PIPE_DEBUG") == "1":
        raise error
    with tempfile.NamedTemporaryFile(
        "w", prefix="pipe-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.writelines(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    _leave(f"error: a bug in pipe: {summary} (please report it with {file.name})", 1)


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
    """Train transformers with one recipe: a chain of stages, any parallelisation strategy."""
    hush_asides()


if __name__ == "__main__":
    main()
