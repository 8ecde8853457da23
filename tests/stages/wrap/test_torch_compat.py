"""Private parts of torch that we read: a test fails when a version of torch has changed them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from pipeline.distributed.process_group import DistContext
from pipeline.errors import EngineMismatch
from stages.optimizer.adamw import AdamW
from stages.precision.policy import PrecisionPolicy
from stages.wrap.build import verify_engine
from stages.wrap.ddp import Ddp
from stages.wrap.fsdp import Fsdp
from stages.wrap.torch_compat import no_buffer_sync
from tests.parity.body import tiny_source
from tests.support.processes import run_ranks
from tests.support.runs import context

ROOT = Path(__file__).parents[3]


def facts_of(dist: DistContext, folder: str, wrap: Any, reduce: Any) -> dict[str, Any]:
    ctx = context(dist, folder)
    policy = PrecisionPolicy(compute="bf16", reduce=reduce, buffer="bf16")
    engine = wrap.run(ctx, tiny_source(ctx), policy.run(ctx), AdamW().run(ctx))
    return dict(engine.describe())


def test_fsdp_facts_are_read_off_torch_state(tmp_path: Any) -> None:
    facts = run_ranks(facts_of, 2, str(tmp_path), Fsdp(sharding="shard_grad_op"), "bf16")[0]
    assert facts["reshard_after_forward"] == [False]
    assert facts["units"] == 4
    assert (facts["master"], facts["compute"], facts["reduce"]) == (["fp32"], ["bf16"], ["bf16"])
    assert facts["buffers"] == ["bf16"]
    assert facts["sharded_parameters"] < facts["parameters"]


def facts_of_ends(dist: DistContext, folder: str, fields: Any) -> dict[str, Any]:
    ctx = context(dist, folder)
    precision = PrecisionPolicy(compute="fp32").run(ctx)
    source = tiny_source(ctx, tie_word_embeddings=False)
    engine = Fsdp(**fields).run(ctx, source, precision, AdamW().run(ctx))
    facts = dict(engine.describe())
    facts["parts"] = [(one.name, one.shape, one.start) for one in engine.fragments()]
    return facts


def test_the_embedding_and_the_head_are_units_that_checkpoints_do_not_know(tmp_path: Any) -> None:
    facts = run_ranks(facts_of_ends, 2, str(tmp_path), {})[0]
    blocks = {"units": ("LlamaDecoderLayer",)}
    named = run_ranks(facts_of_ends, 2, str(tmp_path), blocks)[0]
    assert (facts["units"], named["units"]) == (6, 4)
    assert facts["reshard_after_forward"] == [False, True]
    assert named["reshard_after_forward"] == [True]
    assert facts["parts"] == named["parts"]


def test_ddp_facts_show_the_hook_that_narrows_gradients(tmp_path: Any) -> None:
    facts = run_ranks(facts_of, 2, str(tmp_path), Ddp(), "bf16")[0]
    assert (facts["master"], facts["compute"], facts["reduce"]) == (["fp32"], ["bf16"], ["bf16"])
    assert facts["buffers"] == ["bf16"]


def test_ddp_knows_its_buffer_argument() -> None:
    assert no_buffer_sync().keys() <= inspect.signature(DistributedDataParallel).parameters.keys()


def refuse(dist: DistContext, folder: str) -> str:
    ctx = context(dist, folder)
    precision = PrecisionPolicy(compute="fp32").run(ctx)
    engine = Fsdp().run(ctx, tiny_source(ctx), precision, AdamW().run(ctx))
    with pytest.raises(EngineMismatch) as caught:
        verify_engine(ctx, engine, {"engine": "DistributedDataParallel", "world_size": 2})
    return str(caught.value)


def test_another_engine_than_asked_for_is_refused(tmp_path: Any) -> None:
    said = run_ranks(refuse, 1, str(tmp_path))[0]
    assert "engine: asked for 'DistributedDataParallel', found 'fully_shard'" in said
    assert "world_size: asked for 2, found 1" in said


PRIVATE = re.compile(r"torch[.\w]*\._[a-z]\w*|\._(cdata|local_tensor)\b", re.IGNORECASE)


@pytest.mark.parametrize("place", ["pipeline/planning/trace", "stages/wrap"])
def test_what_torch_keeps_private_is_used_in_compat_files_alone(place: str) -> None:
    used = {
        (file.name, found[0])
        for file in (ROOT / place).glob("*.py")
        if not file.stem.endswith("compat")
        for found in PRIVATE.finditer(file.read_text("utf-8"))
    }
    assert used == set()
