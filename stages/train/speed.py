"""Where the time of steps goes: steps under torch.profiler, the use of the accelerators, and ranks
that hold up the others.

Model FLOPs utilisation is the model's arithmetic as a share of an accelerator's peak. Chowdhery et
al. 2022, PaLM, appendix B: a token costs 6 N + 12 L H Q T floating-point operations in forward and
backward, with N parameters of matrix products (an input embedding if it is tied to the output),
L blocks, H attention heads of size Q, and sequence length T. Utilisation is that times tokens per
second over the peak. Recomputation does not count. A frozen parameter costs 4 instead of 6.
Attention counts in full, although a causal mask makes half of it unnecessary.

The time of a step is the same on all ranks, since they wait for each other. So a rank is judged by
what it does without others: its wait for data, and the same arithmetic on every rank, timed between
steps.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import PreTrainedModel

from pipeline import Context, DistContext, Engine, ModelSource
from pipeline.hardware import find_accelerator, memory_history, write_snapshot
from stages.batches.feed import WAIT
from stages.model.declared import logical_numel, outline

T = TypeVar("T")


class Breakdown(NamedTuple):
    """Shares of a step's time, 0 to 1, which add up to 1; NaN: not known."""

    compute: float
    """The rank computed."""
    communication: float
    """A collective was under way, and the rank computed nothing; waiting for slower ranks too."""
    data: float
    """The rank waited for a micro-batch, and did neither."""
    idle: float
    """None of these: the interpreter, launches of kernels, gaps between them."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Result of profiling a step."""

    seconds: float
    """Duration of the step, including the profiler's own work in it."""
    shares: Breakdown
    """Means of the ranks'; NaN if a rank's is not known."""


@dataclass(frozen=True)
class Profiler:
    """Records steps, and writes each rank's traces to a folder."""

    folder: Path
    engine: Engine
    dist: DistContext

    def run(self, step: int, take: Callable[[], T]) -> tuple[T, Profile]:
        """Call `take`, the step of this number, and write its trace; returns the result and its
        profile (collective)."""
        device, ranks = self.engine.device, self.dist.world_size
        on_gpu = device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"step-{step:08d}-rank-{self.dist.rank:05d}.json.gz"
        with self._memory(path, on_gpu=on_gpu), profile(activities=kinds) as recorded:
            # Starting takes some ranks longer than others.
            self.engine.total(torch.zeros((), device=device))
            began = time.perf_counter()
            with record_function(STEP):
                taken = take()
                if on_gpu:
                    torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began
        recorded.export_chrome_trace(str(path))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            own = breakdown(json.load(file)["traceEvents"], ranks=ranks)
        total = self.engine.total(torch.tensor(own, dtype=torch.float64, device=device)) / ranks
        return taken, Profile(seconds=seconds, shares=Breakdown(*total.tolist()))

    @contextlib.contextmanager
    def _memory(self, trace: Path, *, on_gpu: bool) -> Iterator[None]:
        """Record what the body allocates on a GPU, and write it next to the trace."""
        if not on_gpu:
            yield
            return
        with memory_history():
            yield
            write_snapshot(trace.with_name(trace.name.replace(".json.gz", "-memory.json.gz")))


Event = Mapping[str, Any]
Span = tuple[float, float]
"""Start and end, in microseconds."""

STEP = "pipe: step"
"""The annotation around the step."""
GLOO = "gloo:"
NCCL = "nccl"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
NO_WORK = ("c10d::", "_c10d_functional::", "autograd::", "torch::autograd::")
"""Operators in which a thread may only wait, or that only contain others."""


def breakdown(events: Sequence[Event], *, ranks: int) -> Breakdown:
    """Return what a step's time went to, by its trace; communication is not known if the trace of
    several ranks shows no collective. On GPUs: NCCL's kernels, other kernels and copies. On CPUs:
    gloo's operations, and innermost operators of the training thread, the interpreter's time
    between them left out."""
    events = [event for event in events if event.get("ph") == "X"]
    step = next(e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation")
    kernels = [event for event in events if event.get("cat") in ON_DEVICE]
    if kernels:
        collectives = [_span(event) for event in kernels if NCCL in event["name"].lower()]
        busy = [_span(event) for event in kernels if NCCL not in event["name"].lower()]
    else:
        collectives = [_span(event) for event in events if event["name"].startswith(GLOO)]
        # Operators of the training thread that compute and contain no other event.
        own = [event for event in events if event.get("tid") == step["tid"]]
        own.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
        busy = []
        for event, following in itertools.zip_longest(own, own[1:]):
            contains = following is not None and following["ts"] < _span(event)[1]
            works = event.get("cat") == "cpu_op" and not event["name"].startswith(NO_WORK)
            if works and "::" in event["name"] and not contains:
                busy.append(_span(event))
    waits = [_span(event) for event in events if event["name"] == WAIT]
    start, end = _span(step)
    compute, communication, data = (
        time / (end - start) for time in _times([busy, collectives, waits], start, end)
    )
    found = Breakdown(compute, communication, data, 1 - compute - communication - data)
    unknown = ranks > 1 and not collectives
    return found._replace(communication=math.nan, idle=math.nan) if unknown else found


def _times(kinds: Sequence[Iterable[Span]], start: float, end: float) -> list[float]:
    """The time in [start, end) that spans of each kind cover, without spans of earlier kinds."""
    edges = [
        (min(max(moment, start), end), kind, change)
        for kind, spans in enumerate(kinds)
        for span in spans
        for moment, change in zip(span, (1, -1), strict=True)
    ]
    times, active, before = [0.0] * len(kinds), [0] * len(kinds), start
    for moment, kind, change in sorted(edges):
        first = next((number for number, count in enumerate(active) if count), None)
        if first is not None:
            times[first] += moment - before
        before = moment
        active[kind] += change
    return times


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event.get("dur", 0)


NARROW = (["bf16"], ["fp16"])
"""Compute dtypes of an engine to which the peaks apply."""


@dataclass(frozen=True)
class Cost:
    """Floating-point operations of a token in forward and backward."""

    multiplied: float
    """Operations that do not depend on the length of the sequence: 6 N."""
    attention: float
    """Operations per token of sequence length: 12 L H Q."""
    peak: float
    """Operations per second of one device."""

    def utilisation(self, tokens: float, squares: float, device_seconds: float) -> float:
        """Share of the peak, 0 to 1, of samples with `tokens` tokens, whose squared lengths sum to
        `squares`, in `device_seconds` seconds times devices."""
        operations = self.multiplied * tokens + self.attention * squares
        return operations / (device_seconds * self.peak)


def known_peak(engine: Engine) -> float | None:
    """Operations per second of the engine's device; None in fp32, and for unknown GPUs."""
    if engine.device.type != "cuda" or engine.describe().get("compute") not in NARROW:
        return None
    device = find_accelerator(torch.cuda.get_device_name(engine.device))
    return None if device is None else device.flops


def known_cost(engine: Engine, source: ModelSource, peak: float) -> Cost | None:
    """Cost of a token of the source's model in an engine, whose device has this peak; None for
    mixtures of experts."""
    model = next((m for m in outline(source).modules() if isinstance(m, PreTrainedModel)), None)
    config: Any = None if model is None else model.config.get_text_config()
    if model is None or getattr(config, "num_experts_per_tok", None):
        return None
    try:
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        attention = 12.0 * config.num_hidden_layers * heads * size
    except AttributeError:
        return None
    state, known, inputs = engine.state(), logical_numel(model), model.get_input_embeddings()
    module = next((name for name, other in model.named_modules() if other is inputs), "")
    embedding = f"{module}.weight"
    tied = embedding in {*state.aliases, *state.aliases.values()}
    multiplied = 0.0
    for name in (*state.updates, *state.frozen):
        if name in state.shapes and (name != embedding or tied):
            elements = known.get(name) or math.prod(state.shapes[name])
            multiplied += (6.0 if name in state.updates else 4.0) * elements
    return Cost(multiplied, attention, peak)


EVERY = 25
"""Steps between two comparisons."""
MARGIN = 1.5
"""A rank that takes this many times as long as the others is named."""
LEAST_SHARE = 0.1
"""Share of the step that it must cost."""
REPEATS = 5
ROWS = {"cpu": 384, "cuda": 2048}
"""Rows of the square matrices whose product is timed; 16 MiB on a GPU."""
PRODUCTS = {"cpu": 1, "cuda": 20}
"""Products in one timing, which is about a millisecond."""


class Figures(NamedTuple):
    """Seconds that one rank takes without the others."""

    step: float
    """Mean of a step."""
    data: float
    """Mean wait for data in a step."""
    arithmetic: float
    """Time of the same products of matrices on every rank."""


def stragglers(figures: Sequence[Figures]) -> Iterator[tuple[int, float, str]]:
    """Ranks that hold up the others, by the figures of all in rank order: each with the share of
    the step's time that it costs, and why."""
    step = statistics.fmean(one.step for one in figures)
    for rank, own in enumerate(figures):
        others = [one for number, one in enumerate(figures) if number != rank]
        if not others:
            return
        usual = statistics.median(one.data for one in others)
        share = (own.data - usual) / step
        if own.data > MARGIN * usual and share > LEAST_SHARE:
            why = f"it waits {own.data:.3g} s for data, the others {usual:.3g} s"
            yield rank, share, why
        usual = statistics.median(one.arithmetic for one in others)
        factor = own.arithmetic / usual
        if factor > MARGIN:
            why = f"it takes {factor:.1f} times as long for the same arithmetic"
            yield rank, 1 - 1 / factor, why


@dataclass(eq=False)
class StragglerWatch:
    """Compares the ranks every EVERY steps."""

    ctx: Context
    _steps: int = 0
    _seconds: float = 0.0
    _data: float = 0.0
    _matrices: tuple[Tensor, Tensor] | None = None

    def look(self, step: int, *, seconds: float, data: float) -> bool:
        """Take note of a step that took `seconds`, `data` of them waiting for data on this rank;
        compare the ranks if it is time (collective), and return whether it was."""
        dist = self.ctx.dist
        if dist.world_size == 1:
            return False
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._data += data
        if self._steps < EVERY:
            return False
        own = Figures(self._seconds / self._steps, self._data / self._steps, self._arithmetic())
        self._steps, self._seconds, self._data = 0, 0.0, 0.0
        for rank, share, why in stragglers([Figures(*one) for one in dist.gather(own)]):
            message = "step %d: rank %d holds up the others for %.0f%% of a step: %s"
            self.ctx.log.warning(message, step, rank, 100 * share, why)
            record = {"straggler": rank, "share": round(share, 3), "why": why}
            self.ctx.metrics.write_training({"step": step, "time": time.time(), **record})
        return True

    def _arithmetic(self) -> float:
        """Shortest of a few timings: what else the machine does at a moment is not its speed, and
        the first may include the device's work on the step that is launched."""
        device = self.ctx.dist.device
        if self._matrices is None:
            rows = ROWS[device.type]
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
            factor = torch.full((rows, rows), 1 / rows, device=device, dtype=dtype)
            self._matrices = factor, torch.empty_like(factor)
        factor, product = self._matrices
        shortest = float("inf")
        for _ in range(REPEATS):
            began = time.perf_counter()
            for _ in range(PRODUCTS[device.type]):
                torch.mm(factor, factor, out=product)
            float(product[0, 0])  # waits for the device
            shortest = min(shortest, time.perf_counter() - began)
        return shortest
