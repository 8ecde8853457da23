"""Ranks as workers of Ray Train (V2): Ray says who takes part, starts them again after failures,
and changes their number; each worker is one rank of the run, and trains on from its checkpoint.

Ray's documentation: https://docs.ray.io/en/latest/train/train.html. Its workers run a function in a
thread, where no signal arrives; so each starts its rank as a process, and watches it, as `pipe`
does on one machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.chain.plan import Plan
from pipeline.checkpoint import location
from pipeline.contracts.metrics import is_record, kind_of
from pipeline.distributed.placement import interfaces
from pipeline.distributed.settings import Attempts, Launch, ProcessCounts, Restarts, Workers
from pipeline.distributed.signals import ENDING, Interrupted
from pipeline.errors import PipeError, RunFailed, UsageError, in_words
from pipeline.execution import failures, rundir
from pipeline.execution.journal import Journal
from pipeline.execution.rank_logging import say
from pipeline.execution.resume import plan_resume
from pipeline.execution.run_spec import RunSpec
from pipeline.launch.ranks import LocalRanks, for_gpus, set_threads, supervise
from pipeline.launch.rounds import GATHER_SECONDS
from pipeline.utils.files import private_folder, replace_text
from pipeline.utils.foreign import json_object, read_tail
from pipeline.utils.processes import kill_descendants
from pipeline.utils.terminal import shown
from pipeline.utils.text import plural
from pipeline.view.screen import Screen

STATE = "ray.json"
"""File in the run's folder: which attempt of Ray's runs, and what it was asked."""
OUTPUT = "logs/output.txt"
"""What rank 0 prints, for the process that has started the run."""
TURN_SECONDS = 2.0
"""Seconds between two turns of all workers, in which rank 0's reports its news."""
POLL_SECONDS = 0.1
NOTICE_SECONDS = 120.0
"""Seconds in which Ray takes a node away, where it does not say when."""
INSTALL = "pip install 'pipetrain[ray]'"
SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",  # the variables of `ray job submit` come again from here
}
"""Ray's variables, in this process and in workers."""


def run_with_ray(plan: Plan, spec: RunSpec, screen: Screen) -> None:
    """Run every rank to its end as a worker of Ray, in the cluster of RAY_ADDRESS or of this
    machine, or in one that this process starts.

    Raises RunFailed with the first failing rank's error, and Interrupted once a signal has stopped
    the ranks.
    """
    run_dir = Path(spec.run_dir)
    start = secrets.token_hex(8)
    message = {"spec": dataclasses.asdict(spec), "start": start}
    (run_dir / rundir.STOP).unlink(missing_ok=True)
    results: list[str | BaseException] = []

    def fit() -> None:  # in a thread: Ray waits where no signal ends it
        try:
            results.append(_fit(plan, message))
        except BaseException as error:
            results.append(error)

    with _cluster(plan), _output(run_dir, screen) as copy_output:
        threading.Thread(target=fit, name="ray-train", daemon=True).start()
        looked = seen = time.monotonic()
        stop, limit = None, plan.recipe.launch.timeouts.rendezvous
        while not results:
            try:
                time.sleep(POLL_SECONDS)
                copy_output()
                if time.monotonic() - looked > TURN_SECONDS:
                    looked = time.monotonic()
                    seen = seen if phase(run_dir, start) == "waits" else looked
                if looked - seen > limit:
                    why = f"Ray has started no worker within {limit:.0f} s: {_room(plan)}"
                    lines = [_failure(run_dir, start), why, failures.continuation(run_dir)]
                    raise RunFailed("\n".join(str(line) for line in lines if line))
            except Interrupted as interrupted:
                stop = interrupted
                if phase(run_dir, start) != "works":  # no rank is there to save
                    raise
                replace_text(run_dir / rundir.STOP, interrupted.cause)
                say(f"{interrupted.cause}: saving after this step, then stopping")
        copy_output()
    (run_dir / rundir.STOP).unlink(missing_ok=True)
    if isinstance(results[0], BaseException):
        raise results[0]
    if results[0] == "stopped":
        raise stop or Interrupted
    if results[0] != "finished":
        error = _failure(run_dir, start) or RunFailed(results[0] or "Ray has ended the run")
        error.args = (f"{error}\n{failures.continuation(run_dir)}",)
        raise error


def _fit(plan: Plan, message: Mapping[str, Any]) -> str:
    """Have Ray run all workers to their end: "finished", "stopped", or why they could not."""
    import ray.train
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class SharedDevices(Backend):  # type: ignore[misc]
        share_cuda_visible_devices = True  # each takes the GPU of its local rank

    class Config(BackendConfig):  # type: ignore[misc]
        backend_cls = SharedDevices

    launch, run_dir = plan.recipe.launch, Path(message["spec"]["run_dir"])
    workers = launch.workers if isinstance(launch.workers, Workers) else None
    (run_dir / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)  # of an earlier start
    trainer = DataParallelTrainer(
        work,
        train_loop_config=dict(message),
        backend_config=Config(),
        scaling_config=ScalingConfig(
            num_workers=(workers.min, workers.max) if workers else plan.view.procs,
            use_gpu=plan.view.device == "cuda",
            resources_per_worker=launch.resources_per_worker and dict(launch.resources_per_worker),
            elastic_resize_monitor_interval_s=workers.look_every if workers else 60.0,
        ),
        run_config=RunConfig(
            name=run_dir.name, storage_path=str(run_dir.parent),
            failure_config=FailureConfig(max_failures=launch.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=None),  # the run's own rules say which
            callbacks=[_cause()],
        ),
    )  # fmt: skip
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        return in_words(error)
    return str(_state(run_dir, message["start"]).get("ended", ""))


def _cause() -> Any:
    """A callback that notes why an attempt has failed, in the one process that sees all workers."""
    from ray.train import UserCallback

    class Cause(UserCallback):  # type: ignore[misc]
        def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Any]) -> None:
            message = run_context.train_loop_config
            kinds = {rank: type(error).__name__ for rank, error in worker_exceptions.items()}
            # not what a worker has raised, but that it is gone
            lost = [rank for rank, kind in kinds.items() if "HealthCheck" in kind]
            raised = [*worker_exceptions.values()]
            note_failure(Path(message["spec"]["run_dir"]), message["start"], lost, raised)

    return Cause()


def note_failure(
    run_dir: Path, start: str, lost: Sequence[int], raised: Sequence[BaseException] = ()
) -> None:
    """Write down the cause of an attempt's end, for the next one: workers that are lost, a rank
    that died, or the rank that raised first, as the others raise when they lose a peer; what
    workers have `raised` where there is no report: a network file system may show a file on another
    machine a minute later."""
    found = failures.reports(run_dir)
    died = next((one.message for one in found if one.restart == "always"), "")
    if lost:
        died = f"the workers of ranks {', '.join(map(str, lost))} were lost"
    if died:
        error = RunFailed(died, restart="always")
    elif found:
        error = failures.first(run_dir, [])
    else:
        known = [one for one in raised if isinstance(one, RunFailed)]
        error = known[0] if known else RunFailed(in_words(raised[0]))
    text = failures.without_continuation(str(error), run_dir)
    facts = {"start": start, "text": text, "restart": error.restart, "memory": error.memory}
    replace_text(private_folder(run_dir / failures.FOLDER) / STATE, json.dumps(facts))


def _failure(run_dir: Path, start: str) -> RunFailed | None:
    """The failure that has ended the attempt before, if one has."""
    found = json_object(run_dir / failures.FOLDER / STATE)
    if found.get("start") != start:
        return None
    return RunFailed(found["text"], restart=found["restart"], memory=found["memory"])


@contextlib.contextmanager
def _cluster(plan: Plan) -> Iterator[None]:
    """Be connected to Ray. Raises UsageError without it."""
    os.environ |= SETTINGS
    try:
        import ray
        import ray.train
    except ImportError as error:
        raise UsageError(f"engine: ray needs Ray Train ({error})", hint=INSTALL) from error
    launch = plan.recipe.launch
    env = {name: os.environ[name] for name in plan.recipe.env if name in os.environ}
    env |= {name: value for name, value in os.environ.items() if name.startswith("PIPE_TRUST")}
    common: dict[str, Any] = {
        "runtime_env": {"env_vars": {**SETTINGS, **env}}, "log_to_driver": False,
        "logging_level": "ERROR", "configure_logging": False,
    }  # fmt: skip
    handlers = {number: signal.getsignal(number) for number in ENDING}
    try:
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), **common)
        except ConnectionError:
            if "RAY_ADDRESS" in os.environ:
                raise
            each = (launch.resources_per_worker or {}).get("CPU", 1.0)
            cores = max(os.cpu_count() or 1, int(each * plan.view.procs))
            ray.init(address="local", num_cpus=cores, **common)
    except Exception as error:
        raise UsageError(f"no connection to Ray: {in_words(error)}", hint="--address HOST:6379 "
                         "names a cluster; without it one is started here") from error  # fmt: skip
    for number, handler in handlers.items():  # Ray has its own, which end this process at once
        signal.signal(number, handler)
    try:
        say(f"Ray at {ray.get_runtime_context().gcs_address}: {_resources()}")
        yield
    finally:
        ray.shutdown()


def _resources() -> str:
    import ray

    found = {name: n for name, n in ray.cluster_resources().items() if name in ("CPU", "GPU")}
    return ", ".join(f"{number:g} {name}" for name, number in sorted(found.items()))


def _room(plan: Plan) -> str:
    """Describe the cluster's nodes and resources, and the workers that the run asks for."""
    import ray

    nodes = plural(sum(node["Alive"] for node in ray.nodes()), "node")
    needs = plural(plan.recipe.launch.fewest or plan.view.procs, "worker")
    return f"its cluster has {nodes} with {_resources()}, and the run asks for {needs}"


@contextlib.contextmanager
def _output(run_dir: Path, screen: Screen) -> Iterator[Any]:
    """Copy what rank 0 prints to the screen, whenever that is called, and show it."""
    output = 1 if screen.output is None else screen.output
    private_folder(run_dir / "logs")
    (run_dir / OUTPUT).write_bytes(b"")
    with (run_dir / OUTPUT).open("rb", buffering=0) as file:

        def copy() -> None:
            screen.refresh()
            while text := file.read(1 << 15):
                os.write(output, text)
                screen.refresh()  # which reads there: more would wait for it

        yield copy


def phase(run_dir: Path, start: str) -> Literal["waits", "works", "saved"]:
    """Whether the run waits for Ray to start workers, works, or is saved, since Ray takes a node
    away, which it does at a known time."""
    state = _state(run_dir, start)
    over = time.time() > state.get("until", math.inf)
    if not state or over or _failure(run_dir, start) is not None:
        return "waits"
    return "saved" if "until" in state else "works"


def _state(run_dir: Path, start: str) -> dict[str, Any]:
    """The state file, if it is of this start; empty before the first attempt."""
    found = json_object(run_dir / STATE)
    return found if found.get("start") == start else {}


def work(message: dict[str, Any]) -> None:
    """Be one worker of Ray's: run one rank to its end. Raises RunFailed where Ray may start all
    again."""
    import ray.train
    import ray.train.collective

    context, spec = ray.train.get_context(), RunSpec(**message["spec"])
    rank, size, run_dir = context.get_world_rank(), context.get_world_size(), Path(spec.run_dir)
    if not (run_dir / rundir.RECIPE).is_file():
        where = f"is not to be seen on {socket.gethostname()}"
        raise UsageError(f"the run's folder {run_dir} {where}: all workers need it (--run-dir)")
    orders = _begin(spec, message["start"], size) if rank == 0 else None
    orders = ray.train.collective.broadcast_from_rank_zero(orders)
    if orders["over"]:
        return
    address = ray.util.get_node_ip_address()
    place = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": orders["host"], "MASTER_PORT": orders["port"],
    }  # fmt: skip
    launch = Launch(**orders["launch"])
    common = interfaces(address) | {name: str(value) for name, value in place.items()}
    if spec.device == "cuda":
        common |= for_gpus(run_dir)
    set_threads(launch, context.get_local_world_size())
    turns, ranks = Turns(run_dir, rank, orders["state"]), LocalRanks([common])
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(kill_descendants())
            stack.enter_context(ranks)
            output = stack.enter_context((run_dir / OUTPUT).open("ab"))
            spec = dataclasses.replace(spec, todo=orders["todo"], restore=orders["restore"])
            ranks.start(spec, output=output.fileno())
            try:
                supervise(ranks, launch, run_dir, lambda asked: turns.look(ranks, asked))
            finally:
                turns.note(ranks)
        turns.end("finished")
    except Interrupted:
        turns.end("stopped")
        while turns.notice and not turns.stop:  # until Ray takes the worker, and starts all again
            time.sleep(1)
    except (PipeError, OSError) as error:
        if isinstance(error, RunFailed) and error.kind == "raised":  # by the rank, which records it
            time.sleep(GATHER_SECONDS)  # a lost peer makes others fail first
        else:
            failures.record(run_dir, rank, "", error)
        raise


def _begin(spec: RunSpec, start: str, size: int) -> dict[str, Any]:
    """Rank 0's decisions at the start of an attempt: what is left to run, and where all meet."""
    import ray.util

    run_dir, address = Path(spec.run_dir), ray.util.get_node_ip_address()
    last, journal = _state(run_dir, start), Journal(run_dir / rundir.JOURNAL)
    plan, attempt = spec.plan(ProcessCounts(procs=size)), int(last.get("attempt", 0)) + 1
    error = _failure(run_dir, start)
    if error is not None:
        once = Attempts(Restarts(limit=1))  # Ray counts them
        if (run_dir / rundir.STOP).exists():
            return {"over": True}
        if once.wait_after(error, progressed=last.get("progressed", False)) is None:
            return {"over": True}
        journal.write("run failed", problem=shown(str(error)), restarting=True)
        (run_dir / failures.FOLDER / STATE).unlink()
    if last:  # also of another number of workers, without a failure
        failures.clear(run_dir, restart=True)  # also of ranks that have lost a peer then
        journal.write("run started", procs=size, device=spec.device, restart=attempt - 1)
        spec = spec.starting(plan_resume(plan, journal))
    state = {"start": start, "attempt": attempt, "progressed": False}
    replace_text(run_dir / STATE, json.dumps(state))
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    launch = {"timeouts": plan.recipe.launch.timeouts, "threads": plan.recipe.launch.threads}
    return {
        "over": False, "host": address, "port": port, "launch": launch, "state": state,
        "todo": tuple(spec.todo), "restore": dict(spec.restore),
    }  # fmt: skip


class Turns:
    """Calls of Ray that all workers have to make together, every two seconds in a thread: they
    report rank 0's newest metrics and checkpoint, and ask whether Ray takes a node away."""

    def __init__(self, run_dir: Path, rank: int, state: Mapping[str, Any]) -> None:
        """`state` is what rank 0, its only writer, has written of this attempt."""
        self.notice = 0.0
        """When Ray takes a node away, in seconds since 1970; 0 if it does not."""
        self.stop = False
        """Whether the command was asked to stop."""
        self._run_dir, self._rank, self._state = run_dir, rank, state
        self._over = threading.Event()
        self._failure: Exception | None = None
        self._landmarks = self._reported = self._saved = 0
        self._thread = threading.Thread(target=self._run, name="pipe-turns", daemon=True)
        self._thread.start()

    def look(self, ranks: LocalRanks, asked: Interrupted | None) -> None:
        """Note what the rank has done, and raise Interrupted when it is to stop, unless it has been
        `asked` already. Raises RunFailed where a turn was not possible."""
        self.note(ranks)
        self._require_turns()
        if asked is None and self.notice:
            raise Interrupted(cause="Ray takes a node away")
        if asked is None and self._rank == 0 and self.stop:
            raise Interrupted

    def note(self, ranks: LocalRanks) -> None:
        """Note what the rank has done."""
        done = ranks.landmarks()
        if done != self._landmarks:
            self._landmarks = done
            if self._rank == 0:
                self._write(progressed=True)

    def end(self, how: str) -> None:
        """Have a last turn, when all ranks have ended like this. Raises RunFailed where a turn was
        not possible, as `look` does: the other workers would wait for this one."""
        self._over.set()
        self._thread.join()
        self._require_turns()
        if self._rank == 0:
            waits = how == "stopped" and self.notice and not self.stop
            self._write(**{"until": self.notice} if waits else {"ended": how})

    def _require_turns(self) -> None:
        if self._failure is not None:
            raise RunFailed(in_words(self._failure), restart="always") from self._failure

    def _write(self, **facts: Any) -> None:
        self._state = {**self._state, **facts}
        replace_text(self._run_dir / STATE, json.dumps(self._state))

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            self._failure = error

    def _turn(self) -> bool:
        """Make one turn; whether another follows."""
        import ray.train
        import ray.train.collective

        if self._rank == 0:
            self._over.wait(TURN_SECONDS)
        news = self._news() if self._rank == 0 else None
        news = ray.train.collective.broadcast_from_rank_zero(news)
        self.stop = news["stop"]
        if news["metrics"]:
            self._report(news)
        notice = ray.train.get_preemption_info()
        if notice is not None:
            at = notice.deadline_ms and notice.deadline_ms / 1000
            self.notice = at or self.notice or time.time() + NOTICE_SECONDS
        return not news["over"]

    def _news(self) -> dict[str, Any]:
        """Rank 0's: the newest step since the last news, its newest checkpoint, and whether the
        command was asked to stop."""
        found: dict[str, Any] = {
            "metrics": {}, "checkpoint": "", "over": self._over.is_set(),
            "stop": (self._run_dir / rundir.STOP).exists(),
        }  # fmt: skip
        with contextlib.suppress(PipeError, OSError):  # of a disk that does not answer
            tail = read_tail(self._run_dir / rundir.METRICS)
            steps = [one for one in tail if is_record(one) and kind_of(one) == "step"]
            done, newest = self._landmarks, steps[-1] if steps else {"step": self._reported}
            if newest["step"] == self._reported and done == self._saved:
                return found
            place = location.known(self._run_dir) if done != self._saved else None
            if place is not None and Path(place).is_relative_to(self._run_dir):
                names = location.open_store(place).names()
                found["checkpoint"] = f"{place}/{names[-1]}" if names else ""
            kept = ("step", "loss", "grad_norm", "lr", "tokens_per_second", "mfu")
            found["metrics"] = {name: newest[name] for name in kept if newest.get(name) is not None}
            self._reported, self._saved = newest["step"], done
        return found

    def _report(self, news: Mapping[str, Any]) -> None:
        import ray.train
        from ray.train import Checkpoint
        from ray.train.v2.api.report_config import CheckpointUploadMode

        is_reported = news["checkpoint"] and self._rank == 0
        own = Checkpoint(news["checkpoint"]) if is_reported else None
        mode = CheckpointUploadMode.NO_UPLOAD
        ray.train.report(dict(news["metrics"]), checkpoint=own, checkpoint_upload_mode=mode)
