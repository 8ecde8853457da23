"""Weights from files to ranks: the right values, each byte read by the rank that needs it, little
memory. The reader counts the bytes that a rank reads; the kernel has the peak of its memory."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.contracts.engine import WEIGHT, Engine
from pipeline.contracts.model import ModelSource, TensorReader
from pipeline.contracts.optimizer import Precision
from pipeline.distributed.process_group import DistContext
from stages.model.hf import HfModel
from stages.optimizer.adamw import AdamW
from stages.weights import converted
from stages.weights.files import SafetensorsReader, TorchFilesReader
from stages.wrap.zero import Zero
from tests.support.models import FAMILIES, filled, random_source, tiny_llama_config
from tests.support.processes import run_ranks
from tests.support.runs import context
from tests.support.strategies import STRATEGIES, having

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

MB = 1_000_000
ALL_PERSIST = "zero3 all persist"
"""ZeRO-3 with DeepSpeed's threshold, which leaves every tiny parameter whole."""
SHARDED = [*having("sharded"), ALL_PERSIST]
REPLICATED = list(having("replicated"))
BASIC = list(having("basic"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine, as plain data that travels to the ranks."""

    wrap: str
    compute: str = "fp32"
    worthwhile: int = converted.WORTHWHILE
    as_stored: bool = True


def engine_of(dist: DistContext, folder: str, case: Case, source: ModelSource) -> Engine:
    ctx, compute = context(dist, folder), case.compute
    plan = AdamW(lr=1e-3, weight_decay=0.1).run(ctx)  # two groups
    wrap = Zero(stage=3) if case.wrap == ALL_PERSIST else STRATEGIES[case.wrap].stage()
    precision = Precision(
        master="fp32", compute=compute, reduce="fp32", buffer=None, loss_scaling=None  # type: ignore[arg-type]
    )  # fmt: skip
    built: Engine = wrap.run(ctx, source, precision, plan)
    return built


# Ranks and the bytes that they read.


def load(dist: DistContext, folder: str, case: Case) -> dict[str, Any]:
    """Build the engine; return this rank's bytes read, its first read, the parts that it holds, and
    the parts with wrong values."""
    converted.WORTHWHILE = case.worthwhile
    SafetensorsReader.as_stored = TorchFilesReader.as_stored = case.as_stored
    source = HfModel(path=folder).run(context(dist, folder))
    readers: list[TensorReader] = []
    order: list[tuple[str, int]] = []
    opening = source.weights

    def weights() -> TensorReader:
        reader = opening()
        reading = reader.read_into

        def read_into(name: str, start: int, out: Tensor) -> None:
            order.append((name, start))
            reading(name, start, out)

        reader.read_into = read_into  # type: ignore[method-assign]
        readers.append(reader)
        return reader

    source.weights = weights  # type: ignore[method-assign]
    engine = engine_of(dist, folder, case, source)
    read = sum(reader.bytes_read for reader in readers)
    reader = opening()
    expected = {name: reader.read(name) for name in reader.names()}
    reader.close()
    held, wrong = [], []
    for part in engine.fragments():
        here = part.state[WEIGHT]
        held.append([part.name, part.start, here.numel()])
        there = expected[part.name].view(-1)[part.start : part.start + here.numel()]
        if here.dtype != torch.float32 or not torch.equal(here, there.float()):
            wrong.append(part.name)
    if case.wrap.startswith("zero"):  # otherwise masters are the parameters themselves
        from deepspeed import zero

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.compute]
        (module,) = engine.parts
        with zero.GatheredParameters(list(module.parameters())):
            for name, parameter in module.named_parameters():
                if not torch.equal(parameter, expected[name].to(dtype)):
                    wrong.append(f"{name} computed with")
    engine.close()
    return {"read": read, "held": held, "wrong": wrong, "first": order[0]}


def load_each(dist: DistContext, folder: str, cases: list[Case]) -> list[dict[str, Any]]:
    """Load one case after another in a process group."""
    return [load(dist, folder, case) for case in cases]


@dataclass(frozen=True)
class Told:
    """Results of a case from all ranks, in bytes as stored."""

    case: Case
    read: list[int]
    own: list[int]
    first: list[tuple[str, int]]
    """First read of each rank: tensor, and element."""
    total: int
    largest: int


def tell(folder: Path, ranks: int, *cases: Case) -> list[Told]:
    """Load on `ranks` ranks. Require that all values are right, and that every element is on some
    rank."""
    source = HfModel(path=str(folder)).run(context(DistContext(device=torch.device("cpu")), folder))
    outcome = run_ranks(load_each, ranks, str(folder), list(cases))
    stored = source.weights()
    names = set(stored.names())
    if torch.equal(stored.read("lm_head.weight"), stored.read("model.embed_tokens.weight")):
        names.remove("lm_head.weight")  # tied
    width = {name: stored.spec(name).dtype.itemsize for name in stored.names()}
    sizes = {name: stored.spec(name).nbytes for name in names}
    stored.close()
    told = []
    for case, of_ranks in zip(cases, zip(*outcome, strict=True), strict=True):
        assert [rank["wrong"] for rank in of_ranks] == [[]] * ranks, case
        reach = dict.fromkeys(sizes, 0)
        for name, start, length in sorted(part for rank in of_ranks for part in rank["held"]):
            assert start <= reach[name], f"nobody holds {name} from {reach[name]} to {start}"
            reach[name] = max(reach[name], start + length)
        assert {name: end * width[name] for name, end in reach.items()} == sizes
        own = [sum(length * width[name] for name, _, length in r["held"]) for r in of_ranks]
        read, first = ([rank[what] for rank in of_ranks] for what in ("read", "first"))
        told.append(Told(case, read, own, first, sum(sizes.values()), max(sizes.values())))
    return told


def require_even(told: Told) -> None:
    """Require that ranks have read every byte once, in about equal parts."""
    assert sum(told.read) == told.total
    assert max(told.read) <= told.total / len(told.read) * 1.05 + told.largest


def in_both(wraps: list[str], **more: Any) -> list[Case]:
    """Return a case in fp32, and one that computes in bf16 next to fp32 masters, for each wrap."""
    return [Case(wrap=wrap, compute=compute, **more)
            for wrap in wraps for compute in ("fp32", "bf16")]  # fmt: skip


def saved(folder: Path, *, dtype: torch.dtype = torch.float32, family: str = "llama") -> Path:
    """Save a model whose sizes no number of ranks divides."""
    source = random_source(FAMILIES[family], folder)
    filled(source).to(dtype).save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.mark.parametrize(
    ("wraps", "ranks"),
    [(SHARDED, 2), ([wrap for wrap in SHARDED if wrap in BASIC], 3)],
    ids=["on two", "on three"],
)
def test_each_rank_reads_its_shard_and_no_byte_more(
    wraps: list[str], ranks: int, tmp_path: Path
) -> None:
    for told in tell(saved(tmp_path), ranks, *in_both(wraps)):
        assert told.read == told.own
        require_even(told)


@pytest.mark.parametrize(
    ("wraps", "ranks"), [(REPLICATED, 2), (["ddp"], 3)], ids=["on two", "on three"]
)
def test_replicas_read_what_is_computed_once_between_them(
    wraps: list[str], ranks: int, tmp_path: Path
) -> None:
    for told in tell(saved(tmp_path), ranks, *in_both(wraps, as_stored=False)):
        assert told.own == [told.total] * ranks
        require_even(told)


def test_replicas_on_the_cpu_read_what_is_stored_themselves(tmp_path: Path) -> None:
    for told in tell(saved(tmp_path), 2, *in_both(REPLICATED)):
        assert told.read == told.own == [told.total] * 2
        assert told.first[0] != told.first[1]  # otherwise a disk would give each byte twice


def test_replicas_of_shards_read_their_shard_once_between_them(tmp_path: Path) -> None:
    for told in tell(saved(tmp_path), 4, *in_both(["fsdp hybrid"], as_stored=False)):
        require_even(told)
        assert told.own[0] == told.own[2]
        assert told.own[1] == told.own[3]
        assert told.own[0] + told.own[1] == told.total
        for shard in (0, 1):  # ranks 0 and 2, and ranks 1 and 3, are replicas
            assert told.read[shard] + told.read[shard + 2] == told.own[shard]


def test_a_rank_alone_reads_everything_once(tmp_path: Path) -> None:
    wraps = (*BASIC, "fsdp no shard")
    for told in tell(saved(tmp_path), 1, *(Case(wrap=wrap) for wrap in wraps)):
        assert told.read == [told.total], told.case


BF16_CASES = [Case(wrap=wrap, compute="bf16", as_stored=False) for wrap in BASIC]


@pytest.mark.parametrize(
    "how", [{"dtype": torch.bfloat16}, {"family": "llama_tied"}], ids=["in bf16", "tied"]
)
def test_a_source_is_read_as_it_is_stored(how: dict[str, Any], tmp_path: Path) -> None:
    """One in bf16 is half to read, and a tied tensor is read once."""
    told = tell(saved(tmp_path / "saved", **how), 2, *BF16_CASES)
    size = sum(one.nbytes for one in state_of(tmp_path / "saved").values())
    if "dtype" in how:
        assert size == sum(one.nbytes for one in state_of(saved(tmp_path / "fp32")).values()) / 2
    for one in told:
        assert sum(one.read) == one.total == size, one.case


def state_of(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_torch_files_are_read_in_parts_too(tmp_path: Path) -> None:
    state = state_of(saved(tmp_path))
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    cases = Case(wrap="fsdp full"), Case(wrap="ddp", as_stored=False)
    sharded, replicated = tell(tmp_path, 2, *cases)
    assert sharded.read == sharded.own
    require_even(sharded)
    require_even(replicated)


def test_stacked_experts_are_read_in_parts_too(tmp_path: Path) -> None:
    """Their file has each expert separately; runs that are not worthwhile are read in parts for the
    first cases, and with others for the rest."""
    wraps = "fsdp full", "zero3", "zero2", "ddp"
    parts = [Case(wrap=wrap, worthwhile=0) for wrap in wraps[:3]]
    whole = [Case(wrap=wrap) for wrap in wraps if wrap != "zero2"]
    for told in tell(saved(tmp_path, family="mixtral"), 2, *parts, *whole):
        if told.case in parts:
            assert told.read == told.own
            require_even(told)
        else:
            assert max(told.read) <= told.total, told.case


# Peak memory of loading.


BIG = tiny_llama_config(
    vocab_size=9001, hidden_size=1024, intermediate_size=9001, num_hidden_layers=1,
    num_attention_heads=16, num_key_value_heads=16, head_dim=64,
)  # fmt: skip
"""Config of 200 MB in tensors of 37 MB, which malloc maps and returns one by one."""
SLACK, UNCOUNTED = 24 * MB, MB  # a kernel adds up the pages that each CPU counted only now and then


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """Return a folder, and the sizes of its model and of the largest tensor."""
    folder = tmp_path_factory.mktemp("big")
    source: Any = random_source(BIG, folder)
    reader = source.weights()
    tensors = {name: torch.zeros(reader.spec(name).shape) for name in reader.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source.config.save_pretrained(folder)
    sizes = [tensor.nbytes for tensor in tensors.values()]
    assert sum(sizes) == pytest.approx(200 * MB, rel=0.02)
    return folder, sum(sizes), max(sizes)


def growths(dist: DistContext, folder: str, case: Case, functions: list[str]) -> list[int]:
    """Build an engine; return the peak growth of memory while each of the functions runs."""
    small = HfModel(config=tiny_llama_config()).run(context(dist, folder))
    engine_of(dist, folder, case, small).close()  # imports everything
    source: Any = HfModel(path=folder).run(context(dist, folder))
    assert source.vocab_size == 9001  # builds the outline
    found: list[int] = []

    def high_water() -> int:
        """Return the peak of this process's memory since the last reset."""
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert peak is not None
        return int(peak.group(1)) * 1024

    def metered(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            Path("/proc/self/clear_refs").write_text("5")
            before = high_water()
            result = function(*args, **options)
            found.append(high_water() - before)
            return result

        return call

    for name in functions:
        module, _, leaf = name.rpartition(".")
        place = importlib.import_module(module)
        setattr(place, leaf, metered(getattr(place, leaf)))
    engine_of(dist, folder, case, source).close()
    return found


def measured(folder: Path, case: Case, *functions: str) -> list[list[int]]:
    return run_ranks(growths, 2, str(folder), case, list(functions))


@pytest.mark.parametrize("compute", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_fsdp_never_has_more_than_its_shard(compute: str, big: tuple[Path, int, int]) -> None:
    folder, total, largest = big
    case = Case(wrap="fsdp full", compute=compute)
    for (engine,) in measured(folder, case, "stages.wrap.fsdp_engine.build"):
        assert total / 2 - UNCOUNTED <= engine <= total / 2 + SLACK < total / 2 + largest + SLACK


def test_ddp_never_has_more_than_one_copy_next_to_its_gradients(big: tuple[Path, int, int]) -> None:
    """A static graph's gradients have no memory yet."""
    folder, total, _ = big
    for (engine,) in measured(folder, Case(wrap="ddp static"), "stages.wrap.ddp_engine.build"):
        assert total - UNCOUNTED <= engine <= total + SLACK
    for (loading,) in measured(folder, Case(wrap="ddp"), "stages.wrap.build.load_weights"):
        assert total - UNCOUNTED <= loading <= total + SLACK


def test_zero3_never_has_more_than_its_shard_and_a_tensor(big: tuple[Path, int, int]) -> None:
    """The limit holds until DeepSpeed makes its masters and buffers, and while these are loaded."""
    folder, total, largest = big
    partition = "stages.wrap.zero.compat.partition_parameters"
    functions = partition, "stages.wrap.zero.engine.load_weights"
    for made, loading in measured(folder, Case(wrap=ALL_PERSIST), *functions):
        assert total / 2 - UNCOUNTED <= made <= total / 2 + largest + SLACK < total
        assert loading <= SLACK
