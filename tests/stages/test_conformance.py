"""Every built-in stage conforms to `pipeline.testing`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.chain.registry import BUILT_IN, Registry
from pipeline.testing import assert_conforms

NAMES = [entry.name for entry in Registry.installed().entries() if entry.distribution == BUILT_IN]

VALID: Mapping[str, Mapping[str, Any]] = {
    "model.hf": {"config": {"model_type": "llama"}},
    "data.text": {"files": "./text.txt", "heldout_fraction": 0.1},
    "data.chat": {"files": ["./chat.jsonl"]},
    "data.stream": {"shards": ["./text.txt"], "window": 2},
    "optimizer.adamw": {
        "betas": [0.9, 0.95],
        "max_grad_norm": None,
        "moments": "8bit",
        "groups": [{"match": ["*.lora_B.*"], "lr_ratio": 16.0}],
    },
    "train.causal_lm": {"global_batch_size": 8, "steps": 10},
    "train.hf_trainer": {
        "global_batch_size": 8,
        "epochs": 1,
        "arguments": {"activation_checkpointing": True},
    },
    "train.finished": {"checkpoint": "."},
    "wrap.zero": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "wrap.accelerate": {"config": "./accelerate.yaml"},
    "export.safetensors": {"folder": "./export", "max_shard_size": "512MiB"},
    "evaluate.lm": {"files": "./text.txt", "window": 8, "stride": 4},
    "publish.hub": {"repo": "someone/tiny", "revision": "v1", "dry_run": True},
    "track.sqlite": {"file": "./runs.sqlite"},
}
"""Valid fields of stages that no fields at all would test too little."""

INVALID: Mapping[str, list[tuple[str, Mapping[str, Any]]]] = {
    "model.hf": [
        ("path", {}),
        ("path", {"path": "./model", "config": {"model_type": "llama"}}),
        ("trust_remote_code", {"path": "./model", "trust_remote_code": 1}),
    ],
    "precision.policy": [("compute", {"compute": "fp8"}), ("master", {"master": "fp16"})],
    "data.text": [
        ("files", {"files": "./missing.txt"}),
        ("sequence_length", {"files": "./text.txt", "sequence_length": 0}),
    ],
    "data.chat": [("files", {}), ("files", {"files": "./missing.jsonl"})],
    "data.stream": [("shards", {}), ("shards", {"shards": "./missing.txt"})],
    "optimizer.adamw": [
        ("lr", {"lr": 0}),
        ("betas.1", {"betas": [0.9, 1.0]}),
        ("warmup_ratio", {"warmup_steps": 3, "warmup_ratio": 0.1}),
        ("decay_ratio", {"schedule": "cosine", "decay_ratio": 0.1}),
        ("power", {"power": 2.0}),
        ("groups.0.match", {"groups": [{"match": []}]}),
        ("kernel", {"kernel": "foreach"}),
    ],
    "optimizer.lion": [("lr", {"lr": 0}), ("power", {"schedule": "wsd", "power": 2.0})],
    "wrap.ddp": [("bucket_cap_mb", {"bucket_cap_mb": 0})],
    "wrap.fsdp": [("sharding", {"sharding": "full"})],
    "wrap.zero": [("stage", {"stage": 4})],
    "track.sqlite": [("file", {}), ("every", {"file": "./runs.sqlite", "every": 0})],
    "track.wandb": [("mode", {"mode": "disabled"}), ("timeout", {"timeout": 0})],
    "average.ema": [("decay", {"decay": 1.0}), ("decay", {"decay": 0})],
    "consolidate.stream": [("weights", {"weights": "mean"})],
    "wrap.accelerate": [("config", {}), ("config", {"config": "./missing.yaml"})],
    "checkpoint.sharded": [("every", {"every": 0})],
    "train.causal_lm": [
        ("global_batch_size", {"steps": 1}),
        ("steps", {"global_batch_size": 8}),
        (
            "global_batch_size",
            {"global_batch_size": 8, "steps": 1, "micro_batch_size": 3, "accumulation": 2},
        ),
    ],
    "train.hf_trainer": [
        ("steps", {"global_batch_size": 8}),
        ("keep", {"global_batch_size": 8, "steps": 1, "keep": 0}),
    ],
    "train.finished": [("checkpoint", {}), ("checkpoint", {"checkpoint": "./missing"})],
    "export.safetensors": [("max_shard_size", {"max_shard_size": "5 bananas"})],
    "evaluate.lm": [
        ("files", {}),
        ("files", {"files": "./missing.txt"}),
        ("stride", {"files": "./text.txt", "window": 8, "stride": 9}),
        ("limit", {"files": "./text.txt", "limit": 3}),
        ("window", {"files": "./text.txt", "window": 1}),
    ],
    "publish.hub": [
        ("repo", {"repo": "tiny", "dry_run": True}),
        ("revision", {"repo": "someone/tiny", "revision": "refs/pr/1", "dry_run": True}),
        ("token_env", {"repo": "someone/tiny", "token_env": "MY-TOKEN", "dry_run": True}),
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_conforms(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a b c\n", encoding="utf-8")
    Path("accelerate.yaml").write_text("distributed_type: NO\n", encoding="utf-8")
    Path("chat.jsonl").write_text("{}\n", encoding="utf-8")
    stage = Registry.installed().load(name)
    assert_conforms(stage, valid=VALID.get(name), invalid=INVALID.get(name, ()))


def test_the_cases_are_about_stages_that_exist() -> None:
    assert {*VALID, *INVALID} <= set(NAMES)
