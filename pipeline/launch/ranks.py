"""The processes of a run on this machine: started, watched, started again after failures; and what
they were doing when one of them stalls."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from pipeline.chain.plan import Plan
from pipeline.distributed.environment import DUMP, FINISHED, STOPPED, Shared, rank_environment
from pipeline.distributed.heartbeat import FIELDS, Phase, Stall, Watchdog, heartbeats
from pipeline.distributed.settings import Attempts, Launch
from pipeline.distributed.signals import ENDING, Interrupted, at_second_interrupt
from pipeline.errors import RunFailed, StageError, in_words
from pipeline.execution import failures, rundir
from pipeline.execution.failures import Exit
from pipeline.execution.journal import Journal
from pipeline.execution.rank_logging import ACTIVITY_FILE
from pipeline.execution.resume import plan_resume
from pipeline.execution.run_spec import RunSpec
from pipeline.execution.rundir import saved_step
from pipeline.hardware.host import cores_each, oom_kills
from pipeline.utils.files import memory_file, private_folder, read_all, replace_text
from pipeline.utils.packages import gc_as_usual
from pipeline.utils.processes import kill_descendants, kill_sessions, start_child
from pipeline.utils.terminal import hidden_variables, shown
from pipeline.view.screen import Screen

SHUTDOWN_SECONDS = 10
"""Seconds that ranks get to end when one has failed, before they are killed."""
FOLDER = "stalls"
"""Folder in the run's: one for each stall, with the stacks of all ranks and `report.json`."""
DUMP_SECONDS = 3.0
"""Seconds that ranks get to write their stacks."""
SHOWN_FRAMES = 4
"""Innermost calls of the stalled rank that are shown."""
COLLECTIVES = f"{FOLDER}/nccl"
"""Folder in the run's: the newest collectives of each rank, kept by NCCL's flight recorder. torch
writes them when a byte comes through a rank's pipe
(https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html); `torchfrtrace` reads
the files, which are torch's own pickles."""
ENTRIES = 2000
"""Collectives that each rank keeps in memory."""


class LocalRanks(contextlib.AbstractContextManager["LocalRanks"]):
    """Ranks on this machine, and the memory that they share with this process: their heartbeats,
    their stacks, and reports of failures that a full disk does not take.

    No rank, nor what it has started, outlives the body of this context manager. `stop`: asks, then
    kills; `__exit__`: kills at once; `kill_descendants`: what ranks left in other sessions.
    """

    def __init__(self, places: Sequence[dict[str, str]]) -> None:
        """`places` has the environment of each rank, by its number on this machine."""
        self.places = places
        self.numbers = [int(place["RANK"]) for place in places]
        """The rank, among all nodes' ranks, of each."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._beats = memory_file("heartbeats", len(places) * FIELDS * 8)
        self.heartbeats = heartbeats(self._beats)
        self._stacks = [memory_file("stacks") for _ in places]
        self._failures = memory_file("failures")
        self._oom_kills = oom_kills()

    def __exit__(self, *error: object) -> None:
        kill_sessions(self.processes)
        for descriptor in (self._beats, self._failures, *self._stacks):
            os.close(descriptor)

    def start(self, spec: RunSpec, store: int | None = None, output: int | None = None) -> None:
        """Start all ranks of the run. They meet in the file `store`, if given; prints of rank 0 go
        to `output`, if given. Raises StageError where the system starts no more processes."""
        message = {"spec": asdict(spec), "hidden": hidden_variables()}
        for number, (place, stacks) in enumerate(zip(self.places, self._stacks, strict=True)):
            files = [self._beats, self._failures, stacks, *([] if store is None else [store])]
            shared = Shared(
                heartbeats=self._beats, number=number, failures=self._failures, stacks=stacks,
                store=store,
            )  # fmt: skip
            prints = output if int(place["RANK"]) == 0 else None
            try:
                process = start_child(
                    "pipeline.execution.worker",
                    {**message, "shared": asdict(shared)}, spec.run_dir,
                    pass_fds=files,
                    env=os.environ | place, stdin=subprocess.DEVNULL, stdout=prints, stderr=prints,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                reason = in_words(error)
                raise StageError(f"the processes could not be started: {reason}") from error
            self.processes.append(process)

    def ends(self) -> list[Exit]:
        """The ends of ranks that have ended."""
        codes = [process.poll() for process in self.processes]
        found = zip(self.numbers, codes, strict=False)  # some may not have been started
        return [Exit(number, code) for number, code in found if code is not None]

    def landmarks(self) -> int:
        """Checkpoints and durable results that the ranks have brought to an end."""
        return max(rank.read().landmarks for rank in self.heartbeats)

    def send(self, number: int) -> None:
        """Send a signal to the ranks that are alive."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def stop(self) -> list[Exit]:
        """End the ranks that are left. Returns the ones that another signal than ours ended: a
        dying process can take longer to be gone than its peers take to notice."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        ends = self.ends()
        kill_sessions(self.processes)
        return [end for end in ends if 0 > end.code != -signal.SIGTERM]

    def end_and_explain(self, run_dir: Path, ends: Sequence[Exit], slot: str | None) -> RunFailed:
        """End the ranks that are left, and return the error of the one that failed first: `ends`
        did not end well, `slot` was running."""
        ends = [*ends, *self.stop()]
        unwritten = read_all(self._failures).splitlines()
        oom = oom_kills() > self._oom_kills
        return failures.first(run_dir, ends, slot, oom=oom, unwritten=unwritten)

    def stacks(self, since: Sequence[int] = ()) -> list[str]:
        """The stacks that each rank has written of its threads, from character `since` on."""
        texts = [read_all(stacks).decode(errors="replace") for stacks in self._stacks]
        return [text[at:] for text, at in zip(texts, since or [0] * len(texts), strict=True)]


def recorder_environment(run_dir: Path) -> dict[str, str]:
    """Variables with which ranks keep their newest collectives; what the user has set stays."""
    folder = run_dir / COLLECTIVES
    wanted = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(ENTRIES),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{folder}/rank-",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{folder}/rank-",
    }
    if any(name in os.environ for name in wanted):
        return {}
    with contextlib.suppress(OSError):  # a full disk is reported by those who need it
        private_folder(run_dir / FOLDER)
        private_folder(folder)
        return wanted
    return {}


def request_collectives(run_dir: Path, ranks: Iterable[int]) -> None:
    """Have the ranks write what they keep; those without a recorder are passed over."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            pipe = os.open(run_dir / COLLECTIVES / f"rank-{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            with os.fdopen(pipe, "wb", buffering=0) as file:
                file.write(b"1")


def report_stall(
    run_dir: Path, slot: str | None, ranks: LocalRanks, stalls: Sequence[Stall]
) -> RunFailed:
    """Have all ranks of this machine write their stacks, keep those in the run's folder, and return
    the error that names the rank which stands still, the first of `stalls`."""
    before = [len(text) for text in ranks.stacks()]
    request_collectives(run_dir, ranks.numbers)
    ranks.send(DUMP)
    ranks.send(signal.SIGCONT)  # a stopped process acts on a signal only when it goes on
    deadline, stacks = time.monotonic() + DUMP_SECONDS, [""]
    while not all(stacks) and time.monotonic() < deadline:
        time.sleep(0.2)  # until one that has begun is done
        stacks = ranks.stacks(before)
    culprit = stalls[0]
    text = f"rank {ranks.numbers[culprit.number]} {culprit.describe()}"
    where = f"slot `{slot}`" if slot else "before the first slot"
    main = stacks[culprit.number].rpartition("hread 0x")[2].splitlines()[1:]
    frames = [f"    {shown(line.strip())}" for line in main[:SHOWN_FRAMES]]
    lines = [f"{text}, {where}", *frames]
    with contextlib.suppress(OSError):  # a disk that does not answer may be what they wait for
        lines.append(f"  stacks of all ranks: {_keep(run_dir, text, ranks, stalls, stacks)}")
    lines.append(failures.continuation(run_dir))
    return RunFailed("\n".join(lines), kind="stalled", restart="always")


def _keep(
    run_dir: Path, text: str, ranks: LocalRanks, stalls: Sequence[Stall], stacks: Sequence[str]
) -> Path:
    """Write the stacks and the report; returns their folder."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = private_folder(private_folder(run_dir / FOLDER) / stamp)
    found = {
        f"rank {ranks.numbers[stall.number]}": {
            "phase": stall.beat.phase.name.lower(),
            "step": stall.beat.step,
            "seconds": round(stall.seconds, 1),
            "stopped": stall.stopped,
        }
        for stall in stalls
    }
    report = json.dumps({"time": time.time(), "problem": text, "stalled": found}, indent=1)
    replace_text(folder / "report.json", report + "\n")
    for number, stack in enumerate(stacks):
        written = shown(stack) or "this rank has not answered\n"
        replace_text(folder / f"rank-{ranks.numbers[number]:05d}.txt", written)
    return folder


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of the allocator: the name that all devices share, and the older one."""
POLL_SECONDS = 0.05
Check = Callable[[Interrupted | None], None]


def run_with_restarts(plan: Plan, spec: RunSpec, screen: Screen) -> None:
    """Run every rank to its end, started again after failures as `launch.restarts` says.

    Raises RunFailed with the first failing rank's error, and Interrupted once a signal has stopped
    the ranks. No rank outlives this call.
    """
    run_dir, now = Path(spec.run_dir), spec
    settings, attempts = plan.recipe.launch, Attempts(plan.recipe.launch.restarts)
    set_threads(settings, plan.per_node)
    while True:
        common = for_gpus(run_dir) if plan.view.device == "cuda" else {}
        ranks = LocalRanks(
            [common | rank_environment(n, plan.per_node) for n in range(plan.per_node)]
        )
        try:
            with kill_descendants(screen.refresh), ranks:
                run_ranks(ranks, settings, now, screen)
                return
        except RunFailed as error:
            rundir.require_kept(run_dir)
            wait = attempts.wait_after(error, progressed=ranks.landmarks() > 0)
            if wait is None or error.stopping:
                raise
            restarted(run_dir, plan, str(error), attempts.number, wait)
            time.sleep(wait)
            now = spec.starting(plan_resume(plan, Journal(run_dir / rundir.JOURNAL)))


def set_threads(settings: Launch, ranks_here: int) -> None:
    """Share the cores among the ranks unless the recipe or the environment has decided."""
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(cores_each(ranks_here))


def for_gpus(run_dir: Path) -> dict[str, str]:
    """Variables for ranks on GPUs; what the user has set stays.

    They reserve memory in segments that grow: gathered units and activations differ in size, and
    would leave gaps between segments of fixed sizes. No rank shares its GPU's memory with another
    process, where such segments can fail."""
    found = recorder_environment(run_dir)
    if not any(name in os.environ for name in ALLOCATOR):
        found[ALLOCATOR[0]] = "expandable_segments:True"
    return found


def restarted(run_dir: Path, plan: Plan, problem: str, number: int, wait: float) -> None:
    """Record and show a failure after which the run is started again in `wait` seconds, as number
    `number` in a row."""
    journal = Journal(run_dir / rundir.JOURNAL)
    first = failures.without_continuation(problem, run_dir)
    journal.write("run failed", problem=shown(first), restarting=True)
    click.echo(f"{first}\n  starting again in {wait:g} s (restart {number})", err=True)
    failures.clear(run_dir, restart=True)
    (run_dir / ACTIVITY_FILE).unlink(missing_ok=True)  # a rank may have been killed at work
    # before the wait, which readers show as a run under way, not as a failed one
    journal.write("run started", procs=plan.view.procs, device=plan.view.device, restart=number)


def run_ranks(ranks: LocalRanks, settings: Launch, spec: RunSpec, screen: Screen) -> None:
    """Run the ranks to their end. They meet in a file in memory, which no one else can open and
    which ends with them."""
    store = memory_file("store")
    try:
        ranks.start(spec, store, screen.output)
    finally:
        os.close(store)
    supervise(ranks, settings, Path(spec.run_dir), lambda interrupted: screen.refresh())


def supervise(ranks: LocalRanks, settings: Launch, run_dir: Path, check: Check) -> None:
    """Watch started ranks until all have finished. Raises RunFailed when one fails or stalls; a
    signal has all of them save and end, and is raised again when they have. `check` is called now
    and then, with what has stopped them if something has, and what it raises ends them."""
    gc_as_usual()  # this may take weeks
    pids = [process.pid for process in ranks.processes]
    watch = Watchdog(ranks.heartbeats, pids, settings.timeouts)
    stop: Interrupted | None = None
    try:
        while True:
            try:
                found = judged(ranks.ends(), len(pids), stopping=stop is not None)
                if found is None:
                    break
                if isinstance(found, Interrupted):
                    raise found
                stalls = [] if found else watch.stalled()
                if found or stalls:
                    slot = Journal(run_dir / rundir.JOURNAL).state().slot
                    if stalls:
                        raise report_stall(run_dir, slot, ranks, stalls)
                    raise ranks.end_and_explain(run_dir, found, slot)
                check(stop)
                time.sleep(POLL_SECONDS)
            except Interrupted as interrupted:
                stop = interrupted
                _announce(stop, ranks, run_dir)
                ranks.send(stop.number)
    except RunFailed as error:
        error.stopping = stop is not None
        raise
    if stop is not None:
        ranks.stop()
        if [end.code for end in ranks.ends()] != [FINISHED] * len(pids):
            raise stop


def judged(exits: list[Exit], ranks: int, *, stopping: bool) -> list[Exit] | Interrupted | None:
    """Judge the exits so far of this many ranks: the failures, maybe none yet; a signal that the
    other ranks have not got; None when there is nothing more to wait for."""
    bad = [end for end in exits if end.code != FINISHED]
    by_signal = [end for end in bad if -end.code in ENDING]
    failed = [end for end in bad if end.code != STOPPED and end not in by_signal]
    if bad and not failed and not stopping:
        # a rank was signalled, not we: the others must hear of it
        return Interrupted(next((-end.code for end in by_signal), None))
    failures_now = failed if stopping else bad
    # in a stop, one with nothing to save has ended at once, and the others would wait for it
    over = (len(exits) == ranks and not failures_now) or (stopping and by_signal)
    return None if over else failures_now


def _announce(interrupted: Interrupted, ranks: LocalRanks, run_dir: Path) -> None:
    """Print what a signal to this process leads to while ranks train, as they save first, and have
    a second Ctrl-C print how to continue."""
    at_second_interrupt(f"stopped by a second SIGINT\n{failures.continuation(run_dir)}\n")
    phases = {rank.read().phase for rank in ranks.heartbeats}
    if phases == {Phase.LOAD} or not interrupted.cause or ranks.ends():
        return  # also where another process got it, which has said so
    how = ""
    if interrupted.number == signal.SIGINT:
        step = None
        with contextlib.suppress(OSError):  # the folder may be gone
            step = saved_step(run_dir / rundir.METRICS)
        since = "the newest checkpoint" if step is None else f"step {step}"
        how = f"; again: stop now and lose the steps since {since}"
    with contextlib.suppress(OSError):  # a closed terminal
        click.echo(f"{interrupted.cause}: saving after this step, then stopping{how}", err=True)
