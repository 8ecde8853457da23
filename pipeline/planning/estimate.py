"""Combine a model's profile, a strategy's memory over a step, and the needs of all other slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.chain.artifacts import Results
from pipeline.hardware.gpus import GIB
from pipeline.planning import forecast
from pipeline.planning.forecast import Extra, Held, PipelineRank, StrategyMemory
from pipeline.planning.planner import Job, forecasts, require_told
from pipeline.planning.profile import Line, Profile
from pipeline.planning.shapes import Step, Topology
from pipeline.planning.walk import ranks_of, stage_profiles, step_peaks

PROCESS = round(0.6 * GIB)
"""Bytes of host memory of a process that has loaded the libraries, measured on CPUs."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Floating-point operations of one rank in an optimizer step, as in `Part`; in a pipeline, of
    the rank with the most. moved: bytes to and from its memory next to products, that is each new
    tensor, twice, and the update's. idle: share of the step in which it waits for other stages."""

    products: float
    attention: float
    again: float
    moved: float
    idle: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Needs of one recipe in bytes. device, host: peaks of the fullest rank's device and of the
    fullest node's memory by phase, page cache not counted. offloaded: state on a node's disk by
    item."""

    device: Mapping[str, Held]
    host: Mapping[str, Held]
    offloaded: Mapping[str, int]
    storage: Sequence[Extra]
    traffic: Sequence[forecast.Traffic]
    copies: forecast.Copies
    step: Step
    work: Work
    caveats: Sequence[str] = ()

    @property
    def peak(self) -> int:
        """Bytes of the device's memory over all phases."""
        return max((held.bytes for held in self.device.values()), default=0)

    @property
    def host_peak(self) -> int:
        """Bytes of the host's memory over all phases."""
        return max((held.bytes for held in self.host.values()), default=0)


def ask_planners(job: Job, profile: Profile) -> Results:
    """The profile, every slot's forecast, and a sentence for each slot without one. Raises the
    planners' errors, and UsageError if nothing forecasts the strategy or a step."""
    known = Results.of(profile, profile.model, job.samples, job.step)
    results, silent = forecasts(job.plan, job.topology, job.planners, known)
    require_told(job.plan, silent)
    results |= Results.of(tuple(silent.values()))
    return results


def combine(topology: Topology, results: Results) -> Estimate:
    """Combine all forecasts. Raises UsageError without a strategy's or a step's."""
    why = "this recipe cannot be planned: {}"
    profile = results.require(Profile, "the model has no profile")
    step = results.require(Step, why.format("no slot forecasts a training step"))
    share: StrategyMemory = results.require(StrategyMemory, why.format("no slot wraps the model"))
    extras = [*results.each(Extra)]
    peaks = step_peaks(profile, share, samples=step.micro_batch, microbatches=step.microbatches)
    disk = {item: size for one in peaks["disk"].values() for item, size in one.items.items()}
    ranks = [_RankStep(profile, one, step) for one in ranks_of(profile, share, step.microbatches)]
    slowest = max(ranks, key=lambda one: one.total("products"))
    waiting = round(slowest.total("offloaded", "forward"))
    copies = share.copies(step.microbatches)
    return Estimate(
        device=peaks["device"],
        host=_host(topology, peaks["both" if topology.device == "cpu" else "host"], extras),
        offloaded={item: size * topology.on_node for item, size in disk.items()},
        storage=[extra for extra in extras if not extra.phases],
        traffic=slowest.traffic(),
        copies=replace(copies, up=copies.up + waiting, down=copies.down + waiting),
        step=step,
        work=Work(
            moved=2 * slowest.total("made") + share.updated,
            idle=slowest.rank.idle,
            **{name: slowest.total(name) for name in ("products", "attention", "again")},
        ),
        caveats=(*profile.model.caveats, *results.each(str), *share.caveats),
    )


class _RankStep:
    """Computation and traffic of a rank in a step."""

    def __init__(self, profile: Profile, rank: PipelineRank, step: Step) -> None:
        self.rank, self._profiles = rank, stage_profiles(profile, rank)
        # Stages take micro-batches of equal shapes.
        samples = rank.microbatches * step.micro_batch
        self._samples = samples if rank.ranks > 1 else step.of_rank

    def total(self, name: str, event: str = "") -> float:
        """An amount of the profile over all micro-batches, at all events or one."""
        return sum(self._of_step(one.total(name, event)) for one in self._profiles)

    def _of_step(self, line: Line) -> float:
        return line.fixed * self.rank.microbatches + line.each * self._samples

    def traffic(self) -> list[forecast.Traffic]:
        """Traffic of shards, inside of the model, and of hidden states; equal kinds as one."""
        rank, sums = self.rank, Counter[forecast.Traffic]()
        for stage in rank.stages:
            for one in stage.memory.traffic(rank.microbatches):
                sums[replace(one, bytes=0)] += one.bytes
        for profile in self._profiles:
            for kind, size in profile.exchanges():
                sums[kind] += round(self._of_step(size))
        if rank.ranks > 1:
            hidden = forecast.Traffic(
                collective="send", bytes=0, ranks=rank.ranks, apart=rank.apart,
                what="hidden states and their gradients",
            )  # fmt: skip
            sums[hidden] += sum(one.hidden * one.received for one in rank.stages) * self._samples
        return [replace(kind, bytes=size) for kind, size in sums.items()]


def _host(topology: Topology, held: Mapping[str, Held], extras: Sequence[Extra]) -> dict[str, Held]:
    ranks = topology.on_node
    base = {"processes": PROCESS * ranks}
    phases = {
        phase: Counter(base | {item: size * ranks for item, size in one.items.items()})
        for phase, one in held.items()
    }
    for extra in extras:
        for phase in extra.phases:
            phases.setdefault(phase, Counter(base))[extra.what] += extra.bytes
    return {phase: Held.of(items) for phase, items in phases.items()}
