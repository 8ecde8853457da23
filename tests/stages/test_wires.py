"""Two engines in one recipe: each check asks about the slots that its stage is wired to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from pipeline import Checkpoints, Context, Data, Durable, Engine, ModelSource, TrainedRun, traits
from pipeline.chain.plan import Plan, make_plan
from pipeline.chain.registry import Entry, Registry
from pipeline.distributed.process_group import DistContext
from pipeline.errors import RecipeError
from pipeline.execution.journal import Journal
from pipeline.execution.resume import plan_resume
from pipeline.execution.run_spec import steps_of
from pipeline.execution.runner import Runner
from pipeline.recipe import load_recipe
from pipeline.testing import plan_view
from pipeline.testing.conformance import checked
from stages.adapter.lora import Lora
from stages.checkpoint.sharded import FullCheckpoint, ShardedCheckpoint
from stages.data.stages import ChatData, StreamData, TextData
from stages.model.config_checks import config_of, declarations
from stages.model.hf import ActivationCheckpointing, HfModel
from stages.optimizer import Lion, NoOptimizer
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.train.causal_lm import TrainCausalLm
from stages.train.settings import Anomalies
from stages.wrap.axes import PipelineParallel, TensorParallel
from stages.wrap.fsdp import Fsdp
from stages.wrap.zero import Zero
from tests.support.processes import run_ranks
from tests.support.runs import TINY, context
from tests.support.tiny_project import CHAIN, tiny_project


@dataclass(frozen=True, kw_only=True)
class Scores(Durable):
    """Of a model: here its engine and the shares of its samples."""

    engine: str
    shares: int

    def record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> Scores:
        return cls(**record)


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score data with a model."""

    def run(self, ctx: Context, engine: Engine, data: Data) -> Scores:
        return Scores(engine=type(engine).__name__, shares=engine.data_axis.count)


REFERENCE: Mapping[str, Mapping[str, Any]] = {
    "model": CHAIN["model"],
    "precision": CHAIN["precision"],
    "data": CHAIN["data"],
    "optimizer": CHAIN["optimizer"],
    "reference": {"use": "wrap.fsdp", "tensor_parallel": {"size": 2}},
    "score": {"use": "score.mine"},
    **{slot: CHAIN[slot] for slot in ("wrap", "checkpoint", "train", "consolidate", "export")},
}
"""A recipe that scores with a reference before it trains."""


MINE = Entry(name="score.mine", value=f"{__name__}:Score", distribution="mine", version="1")


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    registry = Registry([*Registry.installed().entries(), MINE])
    tiny_project(tmp_path)

    def make(*overrides: str, procs: int = 2, **slots: Mapping[str, Any] | None) -> Plan:
        stages: dict[str, Any] = {}
        for slot, fields in REFERENCE.items():
            stages |= {slot: dict(fields)}
            stages |= {
                name: value for name, value in slots.items() if name.startswith(f"after_{slot}")
            }
        recipe = {"name": "two", "launch": {"procs": procs, "device": "cpu"}, "stages": stages}
        file = tmp_path / "two.yaml"
        file.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return make_plan(load_recipe(file, overrides), registry=registry)

    return make


def refused(make: Callable[..., Plan], *overrides: str, **slots: Any) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        make(*overrides, **slots)
    return [f"{one.key}: {one.message}" for one in caught.value.problems]


def test_batches_are_divided_by_the_engine_that_is_trained(planned: Callable[..., Plan]) -> None:
    """The reference has one share of samples on two processes, the trained engine two."""
    arithmetic = ("train.micro_batch_size=1", "train.accumulation=2", "train.global_batch_size=4")
    plan = planned(*arithmetic)
    slots = plan.view.slots
    assert plan.view.data_ranks(slots["train"]) == 2
    assert plan.view.data_ranks(slots["score"]) == 1
    wrong = refused(planned, *arithmetic, "train.global_batch_size=2")
    assert wrong == [
        "train.global_batch_size: is 2, but micro_batch_size x accumulation x processes = "
        "1 x 2 x 2 = 4"
    ]
    (averaged,) = planned(*arithmetic, after_wrap={"use": "average.ema"}).trainings
    assert plan.view.data_ranks(averaged.stage) == 2
    reversed_ = planned(
        "reference=null", "score=null", "wrap.use=wrap.fsdp", "wrap.tensor_parallel={size: 2}",
        *arithmetic[:2], "train.global_batch_size=2",
    )  # fmt: skip
    assert reversed_.view.data_ranks(reversed_.view.slots["train"]) == 1


def test_an_adapter_after_a_reference_changes_the_next_engine(planned: Callable[..., Plan]) -> None:
    adapter = {"use": "adapter.lora", "rank": 4}
    plan = planned(after_score=adapter)
    wires = plan.view.wiring
    assert wires.producer("wrap", ModelSource) == "after_score"
    assert wires.producer("reference", ModelSource) == "model"
    late = refused(planned, after_wrap=adapter)
    assert late == [
        "after_wrap: stands after slot `wrap`, which builds the model, and changes nothing"
    ]


def test_axes_are_checked_with_the_adapter_of_their_own_engine(
    planned: Callable[..., Plan],
) -> None:
    """The reference divides layers, and is of the model without an adapter."""
    dora = {"use": "adapter.lora", "rank": 4, "dora": True}
    planned(after_score=dora)
    assert refused(planned, after_model=dora) == [
        "reference.tensor_parallel: DoRA takes the lengths of whole rows of weights, and ranks "
        "have parts of them"
    ]


def test_a_router_loss_is_of_the_training_that_reads_the_engine(
    planned: Callable[..., Plan],
) -> None:
    context = "reference.context_parallel={size: 2}"
    apart = refused(planned, "reference.tensor_parallel=null", context, "train.router_loss=0.1")
    assert apart == ["train.router_loss: the model has no experts"]
    same = refused(planned, "wrap.context_parallel={size: 2}", "train.router_loss=0.1")
    assert [one.partition(":")[0] for one in same] == ["wrap.context_parallel", "train.router_loss"]


def test_dtypes_are_those_of_the_precision_that_a_wrap_gets(planned: Callable[..., Plan]) -> None:
    zero = ("wrap.use=wrap.zero", "wrap.stage=1")
    narrow = {"use": "precision.policy", "compute": "bf16", "master": "bf16"}
    said = ["wrap.stage: the precision slot asks for bf16 master weights; stage 1 keeps fp32"]
    assert refused(planned, *zero, after_precision=narrow)[-1:] == said
    planned(*zero, "wrap.takes={precision: precision}", after_precision=narrow)
    assert refused(planned, *zero, after_score=narrow) == said


def test_engines_and_models_of_one_training(planned: Callable[..., Plan]) -> None:
    adapter = {"use": "adapter.lora", "rank": 4}
    planned("train.takes={engine: reference}", "wrap=null")
    said = refused(planned, "train.takes={engine: reference}")
    assert said == [
        "train: trains the engine of slot `reference`, but slot `checkpoint` saves the engine of "
        "slot `wrap`"
    ]
    said = refused(planned, "checkpoint.takes={model: model}", after_score=adapter)
    assert said == [
        "checkpoint: gets the model of slot `model`, but its engine, slot `wrap`, was built from "
        "slot `after_score`"
    ]
    none, lion = {"use": "optimizer.none"}, {"use": "optimizer.lion"}
    planned("reference.takes={optimizer: after_data}", after_data=none)
    assert refused(planned, after_score=none)[0] == (
        "train: trains the engine of slot `wrap`, whose optimizer, slot `after_score`, trains "
        "nothing"
    )
    assert refused(planned, after_wrap=lion) == [
        "train: gets the optimizer of slot `after_wrap`, but its engine, slot `wrap`, was built "
        "with slot `optimizer`"
    ]
    plain = {"use": "wrap.ddp", "takes": {"model": "model"}}
    planned("reference=null", "score=null", "wrap=null", after_optimizer=plain)


FURTHER: Mapping[str, Any] = {
    "after_train_model": {"use": "model.trained"},
    "after_train_data": CHAIN["data"],
    "after_train_wrap": {"use": "wrap.fsdp"},
    "after_train_checkpoint": {"use": "checkpoint.sharded"},
    "after_train_train": {"use": "train.causal_lm", "steps": 2, "global_batch_size": 4},
}
"""A further training of what the first has made."""


def further(slot: str, **fields: Any) -> dict[str, Any]:
    return {**FURTHER, f"after_train_{slot}": {**FURTHER[f"after_train_{slot}"], **fields}}


def test_an_export_and_a_model_are_of_one_training(planned: Callable[..., Plan]) -> None:
    """A crossed wire writes another model's config, or another training's weights."""
    alone, model = ("reference=null", "score=null"), CHAIN["model"]
    kept = [f"{slot}.takes={{model: model}}" for slot in ("wrap", "checkpoint", "train")]
    crossed = "export: gets the model of slot `after_model`, but slot `train` trained the one of "
    assert refused(planned, *alone, *kept, after_model=model) == [f"{crossed}slot `model`"]
    planned(*alone, *kept, "export.takes={model: model}", after_model=model)
    planned(*alone, **FURTHER)
    first = "consolidate.takes={trained: train}"
    assert refused(planned, *alone, first, **FURTHER) == [
        "export: gets the training of slot `after_train_train`, but the weights of slot "
        "`consolidate` are from slot `train`"
    ]
    planned(*alone, first, "export.takes={trained: train, model: model}", **FURTHER)
    lora = {"use": "adapter.lora", "rank": 4}
    plain = further("model", takes={"model": "model"})
    assert refused(planned, *alone, after_model=lora, **plain) == [
        "after_train_model: gets the model of slot `model`, but slot `train` trained the one of "
        "slot `after_model`"
    ]


def test_a_further_training_is_of_the_model_of_the_one_before(planned: Callable[..., Plan]) -> None:
    alone, lora = ("reference=null", "score=null"), {"use": "adapter.lora", "rank": 4}
    said = "gets the model of slot `after_train_model`, but its engine, slot `after_train_wrap`, "
    said += "was built from slot `model`"
    base = further("wrap", takes={"model": "model"})
    assert refused(planned, *alone, **base) == [
        f"after_train_checkpoint: {said}", f"after_train_train: {said}",
    ]  # fmt: skip
    late = "stands after slot `wrap`, which builds the model, and changes nothing"
    assert refused(planned, *alone, after_wrap=lora, **FURTHER) == [f"after_wrap: {late}"]
    adapted = {"after_train_model": FURTHER["after_train_model"], "after_train_lora": lora}
    adapted |= FURTHER
    planned(*alone, **adapted)
    assert refused(planned, *alone, "export.use=export.adapter", **adapted) == [
        "export: the adapter changes the model of slot `train`, which no folder holds"
    ]


def two_engines(dist: DistContext, folder: str, *overrides: str) -> dict[str, Any]:
    """Run a recipe of two engines; return the record of every durable result."""
    registry = Registry([*Registry.installed().entries(), MINE])
    plan = make_plan(load_recipe(Path(folder, "two.yaml"), overrides), registry=registry)
    journal = Journal(Path(folder, "journal.jsonl"))
    found = plan_resume(plan, journal)
    runner = Runner(steps_of(plan), context(dist, folder), journal)
    try:
        runner.run(found.run, found.restore)
    finally:
        runner.close()
    return {slot: done.record for slot, done in journal.state().finished.items() if done.record}


def test_a_run_follows_the_wires(planned: Callable[..., Plan], tmp_path: Path) -> None:
    judge = {"use": "score.mine", "takes": {"engine": "reference"}}
    planned(after_wrap=judge)
    short = (
        "train.steps=2",
        "train.eval_every=null",
        "train.generate=null",
        "checkpoint.every=null",
    )
    (done, _) = run_ranks(two_engines, 2, str(tmp_path), *short)
    reference = {"engine": "FsdpEngine", "shares": 1}
    assert (done["score"], done["after_wrap"]) == (reference, reference)
    assert done["train"]["progress"]["step"] == 2
    own = "after_wrap.takes.engine=wrap"
    (again, _) = run_ranks(two_engines, 2, str(tmp_path), *short, own)
    assert again["after_wrap"] == {"engine": "DdpEngine", "shares": 2}
    assert again["train"] == done["train"]


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A stage of another package, with every trait that a check of ours asks about."""

    holds_out: ClassVar[bool] = False
    has_epochs: ClassVar[bool] = False
    recomputes_operations: ClassVar[bool] = True
    compile: ClassVar[str] = "all"
    router_loss: ClassVar[float] = 0.1
    loss_chunk_size: ClassVar[int] = 8
    epochs: ClassVar[float] = 1.0
    every: ClassVar[int | None] = None

    def config_at_hand(self) -> dict[str, Any]:
        return {**TINY, "num_hidden_layers": 1, "max_position_embeddings": 64}

    def needs_whole_weights(self) -> Iterator[tuple[str, str]]:
        yield "because", "leave it"


@dataclass(frozen=True, kw_only=True)
class OtherModel(Elsewhere):
    """A model."""

    def run(self, ctx: Context) -> ModelSource:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class OtherData(Elsewhere):
    """Data."""

    sequence_length: ClassVar[int] = 512

    def run(self, ctx: Context) -> Data:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class OtherCheckpoints(Elsewhere):
    """Checkpoints."""

    def run(self, ctx: Context, engine: Engine) -> Checkpoints:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class OtherTrain(Elsewhere):
    """A training."""

    def run(self, ctx: Context, engine: Engine, model: ModelSource, data: Data) -> TrainedRun:
        raise AssertionError("never run")


@dataclass(frozen=True, kw_only=True)
class Further:
    """The model of a training."""

    def run(self, ctx: Context, trained: TrainedRun, model: ModelSource) -> ModelSource:
        raise AssertionError("never run")


def test_a_training_merges_the_adapters_before_it() -> None:
    blocks = ActivationCheckpointing(keep="matmuls")
    model = HfModel(config=TINY, activation_checkpointing=blocks)
    adapter, first, again = Lora(dora=True), OtherTrain(), Fsdp()
    slots = {"model": model, "adapter": adapter, "wrap": again, "data": OtherData(), "train": first}
    view = plan_view({**slots, "further": Further(), "second": Fsdp(), "rest": OtherTrain()})
    assert [*declarations(again, view)] == [adapter, model]
    assert [*declarations(view.slots["second"], view)] == [view.slots["further"], model]
    assert config_of(view.slots["second"], view) == TINY


def found(stage: Any, procs: int = 4, **slots: Any) -> list[str]:
    """Return what a stage's check says next to others."""
    return [f"{one.key}: {one.message}" for one in checked(stage, plan_view(slots, procs=procs))]


def test_stages_of_other_packages_are_seen_by_their_traits() -> None:
    zero_bubble = PipelineParallel(size=2, schedule="InterleavedZeroBubble")
    wrap = Fsdp(
        sharding="no_shard", pipeline_parallel=zero_bubble, tensor_parallel=TensorParallel(size=2)
    )
    halves = "InterleavedZeroBubble runs backward in two halves, for inputs and for weights, which"
    schedule = "pipeline_parallel.schedule"
    assert found(wrap, model=OtherModel(), train=OtherTrain()) == [
        f"{schedule}: {halves} the model slot's activation_checkpointing.keep does not allow",
        f"{schedule}: {halves} compiled blocks do not allow",
        f"{schedule}: {halves} a loss in chunks does not allow",
        "pipeline_parallel: the train slot's router_loss is a mean over all layers, and a stage "
        "has some of them",
        "tensor_parallel: because",
        "pipeline_parallel.size: the model's 1 blocks do not make 4 pipeline stages",
    ]
    assert [one.partition(":")[0] for one in found(Zero(stage=3), model=OtherModel())] == ["stage"]
    train = TrainCausalLm(
        global_batch_size=4, steps=1, eval_every="1 epoch", router_loss=0.1,
        anomalies=Anomalies(non_finite="rollback"),
    )  # fmt: skip
    assert found(train, model=OtherModel(), data=OtherData(), save=OtherCheckpoints()) == [
        "anomalies.non_finite: rollback goes back to the newest checkpoint, and none is saved "
        "before the end",
        "eval_every: needs held-out samples, and there are none",
        "eval_every: is 1 epoch, and the data slot does not know how many samples an epoch has",
        "router_loss: the model has no experts",
    ]
    stream = StreamData(shards="s3://bucket/*.jsonl")
    assert found(stream, wrap=Fsdp(), train=OtherTrain()) == [
        "shards: does not know how many samples an epoch has"
    ]
    saving = ShardedCheckpoint(every="1 epoch")
    readers: dict[str, Any] = {
        "data": OtherData(),
        "save": saving,
        "train": TrainCausalLm(global_batch_size=4),
    }
    assert found(saving, **readers) == [
        "every: is 1 epoch, and the data slot does not know how many samples an epoch has"
    ]
    long: dict[str, Any] = {"data": OtherData(), "wrap": Fsdp(), "train": OtherTrain()}
    model = HfModel(config={**TINY, "max_position_embeddings": 64})
    assert found(model, **long) == [
        ": samples of slot `data` may have 512 tokens, and the model has 64 positions"
    ]


BUILT_IN_TRAITS: Mapping[str, list[Any]] = {
    "DeclaresConfig": [HfModel()],
    "ChangesBlocks": [HfModel()],
    "FreezesModel": [Lora()],
    "NeedsWholeWeights": [Lora()],
    "StartsFrom": [Lora(), ShardedCheckpoint()],
    "DeclaresDtypes": [PrecisionPolicy()],
    "DeclaresRules": [AdamW(), Lion(), NoOptimizer()],
    "LimitsLength": [ChatData(), TextData(files="x"), StreamData(shards="x")],
    "HoldsOut": [ChatData(), TextData(files="x"), StreamData(shards="x")],
    "HasEpochs": [StreamData(shards="x")],
    "SavesEvery": [ShardedCheckpoint(), FullCheckpoint()],
    "RetainsCheckpoints": [ShardedCheckpoint(), FullCheckpoint()],
    "NamesFormat": [ShardedCheckpoint(), FullCheckpoint()],
    "TrainsEpochs": [TrainCausalLm(global_batch_size=1)],
    "ChunksLoss": [TrainCausalLm(global_batch_size=1)],
    "AddsRouterLoss": [TrainCausalLm(global_batch_size=1)],
}


def test_every_trait_is_one_of_a_stage_of_ours() -> None:
    defined = {
        name for name, one in vars(traits).items() if getattr(one, "_is_protocol", False)
    } - {"Protocol"}
    assert set(BUILT_IN_TRAITS) == defined
    for name, stages in BUILT_IN_TRAITS.items():
        protocol = getattr(traits, name)
        assert all(isinstance(one, protocol) for one in stages), name
        assert not isinstance(Fsdp(), protocol), name
