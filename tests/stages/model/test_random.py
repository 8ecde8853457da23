"""Random initial weights: a pure function of seed and module, by the architecture's own rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import StageError
from stages.model.declared import outline
from stages.model.reconcile import unit_seed
from tests.support.models import (
    FAMILIES,
    filled,
    logits,
    random_source,
    tiny_llama_config,
    volatile_buffers,
)
from tests.support.tier import examples

HERE = Path()


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_model(family: str) -> None:
    config = FAMILIES[family]
    one, other = (filled(random_source(config, HERE, seed=3)) for _ in range(2))
    assert torch.equal(logits(one), logits(other))
    assert logits(one).isfinite().all()
    assert logits(one).std() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_other_seed_other_matrices(family: str) -> None:
    config = FAMILIES[family]
    one, other = (random_source(config, HERE, seed=seed).weights() for seed in (1, 2))
    matrices = [name for name in one.names() if one.read(name).ndim > 1]
    assert matrices
    assert not any(torch.equal(one.read(name), other.read(name)) for name in matrices)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_the_state_dict(family: str) -> None:
    source = random_source(FAMILIES[family], HERE)
    model = source.build()
    reader = source.weights()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: tuple(reader.read(name).shape) for name in reader.names()} == shapes


@examples(10)
@given(data=st.data())
def test_order_of_reading_does_not_matter(data: st.DataObject) -> None:
    source = random_source(FAMILIES["gpt2"], HERE)
    straight = source.weights()
    expected = {name: straight.read(name) for name in straight.names()}
    order = data.draw(st.permutations(sorted(expected)))
    shuffled = source.weights()
    for name in order:
        assert torch.equal(shuffled.read(name), expected[name]), name


def test_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    reader = random_source(FAMILIES["llama"], HERE).weights()
    reader.read("lm_head.weight")
    assert torch.equal(torch.get_rng_state(), before)


def test_blocks_differ_and_caller_may_write_into_what_it_read() -> None:
    reader = random_source(FAMILIES["llama"], HERE).weights()
    first = reader.read("model.layers.0.mlp.up_proj.weight")
    assert not torch.equal(first, reader.read("model.layers.1.mlp.up_proj.weight"))
    copy = reader.read("model.layers.0.mlp.up_proj.weight")
    copy.zero_()
    assert torch.equal(reader.read("model.layers.0.mlp.up_proj.weight"), first)


def test_gpt2_keeps_its_depth_scaling() -> None:
    config = FAMILIES["gpt2"] | {"n_embd": 120, "n_layer": 8}
    reader = random_source(config, HERE).weights()
    # Radford et al. 2019: residual projections are scaled by 1/sqrt(2 * layers).
    assert reader.read("transformer.h.3.mlp.c_proj.weight").std().item() == pytest.approx(
        0.02 / 4, rel=0.02
    )
    assert reader.read("transformer.h.3.mlp.c_fc.weight").std().item() == pytest.approx(
        0.02, rel=0.02
    )
    assert torch.equal(reader.read("transformer.h.3.ln_1.weight"), torch.ones(120))


def test_gemma_norms_start_at_zero() -> None:
    reader = random_source(FAMILIES["gemma2"], HERE).weights()
    assert torch.equal(reader.read("model.norm.weight"), torch.zeros(36))


def test_tied_names_share_one_value() -> None:
    reader = random_source(FAMILIES["llama_tied"], HERE).weights()
    assert torch.equal(reader.read("lm_head.weight"), reader.read("model.embed_tokens.weight"))


def test_unknown_name() -> None:
    with pytest.raises(StageError, match="no tensor named nonsense"):
        random_source(FAMILIES["llama"], HERE).weights().read("nonsense")


def test_seed_of_a_unit_is_pinned() -> None:
    # A silent change of the derivation would make old runs unrepeatable.
    assert unit_seed(0, "model.layers.0") == 0xE9C52F78FE6B475E
    assert unit_seed(0, "model.layers.0") != unit_seed(0, "model.layers.1")


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_real_where_parameters_are_empty(family: str) -> None:
    source = random_source(FAMILIES[family], HERE)
    empty = outline(source)
    assert all(parameter.is_meta for parameter in empty.parameters())
    for name, buffer in volatile_buffers(source.build()):
        assert torch.equal(empty.get_buffer(name), buffer), name


def test_families_with_tables_have_such_buffers() -> None:
    names = [name for name, _ in volatile_buffers(random_source(FAMILIES["gemma2"], HERE).build())]
    assert "model.embed_tokens.embed_scale" in names
    assert "model.rotary_emb.inv_freq" in names


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_in_order(family: str) -> None:
    source = random_source(FAMILIES[family], HERE)
    model = source.build()
    names = {id(module): name for name, module in model.named_modules()}
    found = [names[id(block)] for block in source.blocks(model)]
    assert [name.rpartition(".")[2] for name in found] == ["0", "1"]


def test_built_module_is_fp32_tied_and_without_cache() -> None:
    source = random_source(tiny_llama_config(tie_word_embeddings=True), HERE)
    model = source.build()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert model.config.use_cache is False
    assert source.vocab_size == 131


def test_fingerprint_follows_config_and_seed() -> None:
    config = tiny_llama_config()
    same = {random_source(config, HERE, seed=1).fingerprint for _ in range(2)}
    assert len(same) == 1
    assert random_source(config, HERE, seed=2).fingerprint not in same
    assert random_source(config | {"rms_norm_eps": 1e-3}, HERE, seed=1).fingerprint not in same
