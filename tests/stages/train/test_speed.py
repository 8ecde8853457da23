"""Utilisation of accelerators, and ranks that hold up the others."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.contracts.engine import EngineState
from pipeline.contracts.metrics import OWN, Metrics, records
from pipeline.distributed.process_group import DistContext
from pipeline.hardware.gpus import find_accelerator
from stages.adapter.lora import Lora
from stages.model.declared import outline
from stages.model.hf import HfModel
from stages.train import speed
from stages.train.speed import Cost, Figures, StragglerWatch, known_cost, known_peak
from tests.support.models import context
from tests.support.processes import run_ranks
from tests.support.runs import context as rank_context
from tests.support.state import Setting, make_engine
from tests.support.state import source as tiny

LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}  # fmt: skip
MATRICES = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
VECTORS = (2 * 32 + 1) * 4096


def cost_of(
    config: dict[str, Any], tmp_path: Any, frozen: str = "-", lora: Lora | None = None
) -> Cost | None:
    """Return the cost of a token on a device with a peak of 1."""
    source = HfModel(config=config, init="random").run(context(tmp_path))
    source = source if lora is None else lora.run(context(tmp_path), source)
    model = outline(source)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tied = config["tie_word_embeddings"]
    state = EngineState(
        shapes=shapes,
        aliases={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
        frozen=[name for name in shapes if frozen in name],
        groups=[],
        updates={name: 0 for name in shapes if frozen not in name},
        loss_scale=None,
    )
    engine: Any = SimpleNamespace(state=lambda: state)
    return known_cost(engine, source, 1.0)


def test_llama_8b(tmp_path: Any) -> None:
    cost = cost_of(LLAMA_8B, tmp_path)
    assert cost == Cost(
        multiplied=6.0 * (MATRICES + VECTORS), attention=12.0 * 32 * 32 * 128, peak=1.0
    )
    # a sample of 8192 tokens: 45 GFLOP for a token's parameters, 12.9 for its attention
    assert cost is not None
    sample = cost.utilisation(8192, 8192**2, 1.0)
    assert sample == pytest.approx(8192 * (45.03e9 + 12.88e9), rel=1e-3)


def test_tied_embeddings_are_multiplied_by_and_frozen_parameters_get_no_gradient(
    tmp_path: Any,
) -> None:
    tied = cost_of({**LLAMA_8B, "tie_word_embeddings": True}, tmp_path)
    assert tied is not None
    assert tied.multiplied == 6.0 * (MATRICES + VECTORS)
    frozen = cost_of(LLAMA_8B, tmp_path, frozen="mlp")
    assert frozen is not None
    mlp = 32 * 3 * 4096 * 14336
    assert frozen.multiplied == 6.0 * (MATRICES + VECTORS - mlp) + 4.0 * mlp


def test_weights_in_four_bits_are_multiplied_by_as_whole_ones(tmp_path: Any) -> None:
    lora = [Lora(quantize=kind) for kind in (None, "nf4")]
    plain, packed = (cost_of(LLAMA_8B, tmp_path, lora=one) for one in lora)
    assert packed == plain


def test_of_a_mixture_of_experts_it_is_not_known(tmp_path: Any) -> None:
    mixture = {
        **LLAMA_8B, "model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }  # fmt: skip
    assert cost_of(mixture, tmp_path) is None


PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.5e12, "NVIDIA H100 PCIe": 756.5e12, "NVIDIA H200": 989.5e12,
    "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A10G": 70e12, "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12, "NVIDIA L40": 181e12, "Tesla T40": None,
}  # fmt: skip


def test_peaks_go_by_whole_words() -> None:
    found = {name: find_accelerator(name) for name in PEAKS}
    assert {name: device and device.flops for name, device in found.items()} == PEAKS


def told_on_cpu(dist: DistContext, folder: str) -> list[Any]:
    ctx, setting = rank_context(dist, folder), Setting(wrap="zero3", compute="bf16")
    made = make_engine(ctx, setting)
    cost = known_cost(made, tiny(ctx, setting), 1.0)
    made.close()
    assert cost is not None
    return [known_peak(made), cost.multiplied, cost.attention]


def test_a_cpu_has_no_peak_and_shards_tell_the_whole_models_cost(
    tmp_path: Any, deepspeed_operators: None
) -> None:
    # blocks of 24 x 24, twice 24 x 12, 24 x 24; 3 x 24 x 37; two norms. Block 1 is frozen.
    block = 2 * 24 * 24 + 2 * 24 * 12 + 3 * 24 * 37 + 2 * 24
    rest = 101 * 24 + 24
    for told in run_ranks(told_on_cpu, 2, str(tmp_path)):
        assert told == [None, 6.0 * (2 * block + rest) + 4.0 * block, 12.0 * 3 * 24]


def named(*figures: Figures) -> list[tuple[int, float, str]]:
    return [(rank, round(share, 3), why) for rank, share, why in speed.stragglers(figures)]


def test_a_wait_for_data() -> None:
    calm, late = Figures(1.0, 0.02, 0.003), Figures(1.0, 0.4, 0.003)
    assert named(calm, late, calm) == [(1, 0.38, "it waits 0.4 s for data, the others 0.02 s")]
    assert named(calm, Figures(1.0, 0.1, 0.003), calm) == []  # too small a share
    assert named(late, late, late) == []  # all wait alike


def test_slow_arithmetic() -> None:
    calm, slow = Figures(1.0, 0.0, 0.003), Figures(1.0, 0.0, 0.006)
    assert named(calm, calm, slow, calm) == [
        (2, 0.5, "it takes 2.0 times as long for the same arithmetic")
    ]
    assert named(calm, Figures(1.0, 0.0, 0.004)) == []
    assert named(slow) == []


def _train(dist: DistContext, folder: str) -> list[dict[str, Any]]:
    ctx = rank_context(dist, folder)
    ctx.metrics = Metrics(ctx.run_dir / "metrics.jsonl" if dist.is_main else None)
    watch, looked = StragglerWatch(ctx), []
    for step in range(1, 2 * speed.EVERY + 1):
        began = time.perf_counter()
        time.sleep(0.01 * dist.rank)
        data = time.perf_counter() - began
        dist.barrier()
        if watch.look(step, seconds=time.perf_counter() - began, data=data):
            looked.append(step)
    assert looked == [speed.EVERY, 2 * speed.EVERY]
    return list(records(ctx.run_dir / "metrics.jsonl")) if dist.is_main else []


def test_a_rank_that_is_late(tmp_path: Any) -> None:
    found = run_ranks(_train, 2, str(tmp_path))[0]
    assert all(one["time"] > 1.7e9 for one in found)
    assert {name for one in found for name in one} <= OWN
    late = [one for one in found if "for data" in one["why"]]
    assert [(one["step"], one["straggler"]) for one in late] == [(25, 1), (50, 1)]
    assert late[0]["share"] == pytest.approx(1, abs=0.5)
