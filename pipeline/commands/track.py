"""`pipe track`."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.commands.options import overrides_argument, run_argument
from pipeline.errors import PipeError, UsageError
from pipeline.utils.text import plural


@click.command("track")
@run_argument()
@overrides_argument
def track(run: Path, overrides: tuple[str, ...]) -> None:
    """Send the remaining measurements of RUN, by default the newest run in ./runs, to its trackers.

    Use it after runs on machines without a network, or after a run that ended before everything
    was sent. OVERRIDES change the run's recipe for this command, such as track.mode=online.
    """
    from pipeline.chain.plan import plan_file, require_sound
    from pipeline.execution import rundir
    from pipeline.track.feeder import facts_of, failure, feeders
    from pipeline.track.stage import TrackerStage
    from pipeline.view.run import History

    folder = rundir.existing(run)
    state = History(folder).state
    if state == "running":
        raise UsageError(f"{folder} is under way, and is sent while it runs")
    plan = plan_file(folder / rundir.RECIPE, overrides, skip_checks=True)
    require_sound(plan, TrackerStage)
    found = feeders(folder, plan)
    if not found:
        hint = "name one in the recipe, as in `track: {use: track.sqlite, file: runs.sqlite}`"
        raise UsageError(f"the recipe of {folder} has no tracker", hint=hint)
    failures = []
    for slot, feeder in found.items():
        try:
            with feeder.alone():  # the run's own may still be at work
                feeder.open(facts_of(folder, plan.recipe))
                feeder.close(state)
        except Exception as error:
            failures.append(f"{slot}: {failure(folder, slot, error)}")
        else:
            click.echo(f"{slot}: {plural(feeder.steps, 'step')} sent")
    if failures:
        raise PipeError("\n".join(failures))
