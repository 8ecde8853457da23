"""Rotary angles that depend on how long a text is."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contracts.data import Data, MicroBatch, Sample
from pipeline.errors import StageError
from stages.batches.layout import collate
from stages.model.config_checks import SEE_LATER_TOKENS, SEE_PADDING, sees_later_tokens
from stages.model.hf import HfModel
from stages.model.rotary_compat import (
    DocumentAngles,
    choose_by_document,
    document_angles,
    document_lengths,
    placed,
    with_positions,
)
from stages.model.source import open_source
from stages.objectives.compat import known_documents
from stages.train.checks import verify_packing
from tests.support.batches import logits_of, micro_batch
from tests.support.every_family import every, small
from tests.support.models import context, filled, random_source, tiny_llama_config
from tests.support.tier import examples, spread

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8,
    "short_factor": [1.0] * 3, "long_factor": [4.0, 5.0, 6.0],
}  # fmt: skip
CONFIGS = {
    "longrope": tiny_llama_config(rope_parameters=LONG),
    "dynamic": tiny_llama_config(rope_parameters=DYNAMIC, max_position_embeddings=8),
}


def rotary(kind: str, folder: Path) -> Any:
    """Return the rotary module of a tiny model."""
    model = random_source(CONFIGS[kind], folder).build()
    return model.get_submodule("model.rotary_emb")


def plain(module: Any, positions: torch.Tensor) -> list[torch.Tensor]:
    """Return what transformers gives, from a module that has computed nothing before."""
    fresh = copy.deepcopy(module)
    return list(type(module).forward(fresh, torch.zeros(1), positions))


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
@examples(30)
def test_the_length_of_each_tokens_document(rows: list[list[int]]) -> None:
    longest = max(map(sum, rows))
    positions, expected = [], []
    for row in rows:
        lengths = [*row, longest - sum(row)]  # the last is padding
        positions.append([place for length in lengths for place in range(length)])
        expected.append([length for length in lengths for _ in range(length)])
    assert document_lengths(torch.tensor(positions)).tolist() == expected


def test_positions_of_padding_begin_anew() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64)
    real = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    given = with_positions(micro_batch(ids, ids, real=real))
    assert given.positions is not None
    assert given.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]
    assert given.documents == [[5], [5]]


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_document_has_the_angles_of_transformers_for_it(kind: str, tmp_path: Path) -> None:
    module = rotary(kind, tmp_path)
    lengths = [3, 8, 9, 20, 14]
    documents = [torch.arange(length)[None] for length in lengths]
    expected = [plain(module, one) for one in documents]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for order in ([3, 0, 4, 1, 2], [0, 1, 2, 3, 4]):
        packed = torch.cat([documents[number] for number in order], dim=1)
        for found, parts in zip(
            module(torch.zeros(1), packed),
            zip(*(expected[number] for number in order), strict=True),
            strict=True,
        ):
            assert torch.equal(found, torch.cat(parts, dim=1))
    assert all(torch.equal(buffers[name], buffer) for name, buffer in module.named_buffers())
    assert set(buffers) == {name for name, _ in module.named_buffers()}
    assert not torch.equal(expected[3][0][:, :3], expected[0][0])  # lengths do make a difference


def test_a_part_of_the_positions_with_lengths_from_elsewhere(tmp_path: Path) -> None:
    module = rotary("longrope", tmp_path)
    whole = torch.arange(20)[None]
    (angles,) = document_angles(module)
    angles.lengths = lambda own: document_lengths(whole)[..., :4]
    cosines, _ = module(torch.zeros(1), whole[:, :4])
    assert torch.equal(cosines, plain(module, whole)[0][:, :4])


def test_other_models_are_left_as_they_are(tmp_path: Path) -> None:
    model = random_source(tiny_llama_config(), tmp_path).build()
    assert not list(document_angles(model))


def test_code_of_a_model_is_refused(tmp_path: Path) -> None:
    model = random_source(CONFIGS["longrope"], tmp_path).build()
    type(model).__module__, before = "transformers_modules.mine", type(model).__module__
    try:
        with pytest.raises(StageError, match="of kind longrope, and depend on the longest row"):
            choose_by_document(model)
    finally:
        type(model).__module__ = before


# Every causal language model of transformers computes each row by itself, and leaves nothing behind
# in its module; other types are refused with a sentence.

LENGTHS = (7, 12, 5, 23)
ROUNDING = 2e-6
"""Relative difference of losses of rows of other lengths."""
UNBUILT = {
    "apertus", "bailing_hybrid", "blt", "cohere_compass_text", "data2vec-text", "dbrx",
    "dots3_note", "gemma3n", "gemma3n_text", "gemma4_assistant", "gemma4_unified_assistant", "git",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "kimi_linear", "lfm2_moe", "mamba2", "ministral",
    "moss_transcribe_diarize", "musicgen", "musicgen_melody", "openai-gpt", "qwen4_exp",
    "qwen4_exp_text", "reformer", "xmod", "zamba",
}  # fmt: skip
"""Types whose shrunk config cannot be built, or computes for minutes."""
CPU = torch.device("cpu")
NAMED = ("llama", "mixtral", "qwen3_5_text", "bert", "xlnet")
ROTARY = [("llama", "dynamic"), ("phi3", "longrope"), ("phimoe", "longrope"),
          ("gemma3_text", "dynamic")]  # fmt: skip


def rows() -> list[Sample]:
    made = []
    for number, length in enumerate(LENGTHS):
        ids = (np.arange(length + 1) * 37 + number * 11) % 900 + 50
        made.append(Sample(input_ids=ids[:-1], labels=ids[1:]))
    return made


def packed(samples: list[Sample]) -> Sample:
    return Sample(
        input_ids=np.concatenate([one.input_ids for one in samples]),
        labels=np.concatenate([one.labels for one in samples]),
        positions=np.concatenate([np.arange(len(one.input_ids)) for one in samples]),
    )


def tiny(config: dict[str, Any], folder: Path) -> Any:
    """Return the model with random weights, in eval mode; of any type, also a refused one."""
    stage = HfModel(config=config, attention="eager")
    ctx = context(folder)
    return filled(open_source(stage, ctx))


def logits(model: Any, batch: MicroBatch) -> torch.Tensor:
    given = placed(model, batch)
    with torch.no_grad(), known_documents(given):
        found: torch.Tensor = logits_of(model, given).float()
    return found


def losses(model: Any, *samples: Sample) -> torch.Tensor:
    """Return the loss of each row of a micro-batch."""
    return losses_of(model, collate(samples, 0, CPU))


def losses_of(model: Any, batch: MicroBatch) -> torch.Tensor:
    each = F.cross_entropy(
        logits(model, batch).flatten(0, 1), batch.labels.flatten(), ignore_index=-100,
        reduction="none",
    )  # fmt: skip
    return each.view(batch.labels.shape).sum(1)


def one_by_one(model: Any) -> torch.Tensor:
    return torch.cat([losses(model, row) for row in rows()])


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative difference."""
    return float(((found - expected) / expected).abs().max())


def sees_what_follows(model: Any) -> bool:
    """Return whether logits change with tokens after them."""
    batch = collate(rows()[-1:], 0, CPU)
    other = batch.input_ids.clone()
    other[0, -3:] = torch.tensor([60, 61, 62])
    changed = replace(batch, tokens={**batch.tokens, "input_ids": other})
    change = logits(model, changed) - logits(model, batch)
    return float(change[:, :-3].abs().max()) > 1e-5


def require_rows(model: Any) -> None:
    """Assert that rows have the same loss whatever is computed with them or was before, and that
    the module's buffers stay as they are."""
    alone = one_by_one(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert apart(losses(model, *rows()), alone) < ROUNDING
    assert torch.equal(one_by_one(model), alone)
    model.train()
    losses(model, *rows())
    model.eval()
    after = dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert [name for name, one in before.items() if not torch.equal(one, after[name])] == []
    whole = packed(rows())
    if abs(float(losses(model, whole).sum() - alone.sum())) > ROUNDING * float(alone.sum()):
        with pytest.raises(StageError, match="packing: a document"):
            verify(model, whole)


def verify(model: Any, sample: Sample) -> None:
    """Do what a run does before the first step of packed samples."""

    def evaluate(batches: list[MicroBatch], measure: Any) -> Any:
        for batch in batches:
            yield losses_of(model, batch)[:, None]

    engine: Any = SimpleNamespace(
        evaluate=evaluate, total=lambda one: one, describe=dict, device=CPU,
        data_axis=SimpleNamespace(count=1),
    )  # fmt: skip
    data: Any = Data.__new__(Data)
    object.__setattr__(data, "packed", True)
    object.__setattr__(data, "pad_id", 0)
    verify_packing(engine, data, [sample])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", dict.fromkeys([*NAMED, *spread(every(), 4)]))
def test_rows_are_computed_each_by_itself(kind: str, tmp_path: Path) -> None:
    if kind in UNBUILT:
        pytest.skip("its shrunk config cannot be built")
    config = small(kind)
    model = tiny(config, tmp_path)
    if kind in SEE_PADDING:
        assert sees_later_tokens(config) is not None
        assert apart(losses(model, *rows()), one_by_one(model)) > 10 * ROUNDING
        return
    assert sees_what_follows(model) == (sees_later_tokens(config) is not None)
    key = SEE_LATER_TOKENS.get(kind)
    if kind not in SEE_LATER_TOKENS:
        require_rows(model)
    elif key is not None:
        config[key] = True
        model = tiny(config, tmp_path)
        assert sees_later_tokens(config) is None
        assert not sees_what_follows(model)
        require_rows(model)


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    wanted = r"each token of a bert sees those after it.*set `is_decoder: true` in its config"
    with pytest.raises(StageError, match=wanted):
        HfModel(config=small("bert")).run(context(tmp_path))


def with_angles(kind: str, angles: str, folder: Path) -> dict[str, Any] | None:
    """Return the config with rotary tables that depend on lengths; None without rotary tables."""
    from transformers import CONFIG_MAPPING

    config = small(kind)
    full = CONFIG_MAPPING[kind](**{k: v for k, v in config.items() if k != "model_type"}).to_dict()
    part = full.get("text_config")
    text, stated = (config["text_config"], part) if isinstance(part, dict) else (config, full)
    tables = stated.get("rope_parameters")
    modules = [one for one in tiny(config, folder).modules() if hasattr(one, "rope_type")]
    if not tables or not modules:
        return None

    def changed(given: dict[str, Any], layer: str = "") -> dict[str, Any]:
        table = getattr(modules[0], f"{layer}inv_freq", None)
        width = 16 if table is None else table.numel()  # no layer of that kind
        kept = {k: v for k, v in given.items() if k in ("partial_rotary_factor", "mrope_section")}
        kept["rope_theta"] = given.get("rope_theta") or 1e4
        if angles == "dynamic":
            return kept | {"rope_type": "dynamic", "factor": 4.0}
        return kept | {
            "rope_type": "longrope", "original_max_position_embeddings": 8,
            "short_factor": [1.0] * width, "long_factor": [4.0 + n for n in range(width)],
            "short_mscale": 1.1, "long_mscale": 1.3,
        }  # fmt: skip

    layers = all(isinstance(one, dict) for one in tables.values())
    text["rope_parameters"] = (
        {layer: changed(one, f"{layer}_") for layer, one in tables.items()}
        if layers
        else changed(tables)
    )
    text["max_position_embeddings"] = 8 if angles == "dynamic" else 32
    return config


def with_transformers_angles(model: Any) -> Any:
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module.__dict__.get("forward"), DocumentAngles):
            del module.forward
    return copied


def require_angles(kind: str, angles: str, folder: Path) -> bool:
    """Assert that rows have the losses of modules of transformers that have computed nothing else;
    return whether the type has such angles."""
    config = with_angles(kind, angles, folder)
    if config is None:
        return False
    model = tiny(config, folder)
    fresh = [losses(with_transformers_angles(model), row) for row in rows()]
    assert apart(one_by_one(model), torch.cat(fresh)) == 0
    require_rows(model)
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "angles"), ROTARY)
def test_angles_of_rows(kind: str, angles: str, tmp_path: Path) -> None:
    assert require_angles(kind, angles, tmp_path)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("angles", ["dynamic", "longrope"])
@pytest.mark.parametrize("kind", [kind for kind in every() if kind not in UNBUILT])
def test_angles_of_rows_of_every_type(kind: str, angles: str, tmp_path: Path) -> None:
    try:
        found = require_angles(kind, angles, tmp_path)
    except AssertionError:
        raise
    except Exception as error:
        pytest.skip(f"cannot be built with such angles: {error}")
    if not found:
        pytest.skip("has no rotary tables")
