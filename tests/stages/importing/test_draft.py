"""Comments of values and outcomes of keys, which a draft keeps with the recipe."""

from __future__ import annotations

from tests.stages.importing.support import made, outcome, translated


def test_values_have_comments_with_their_sources() -> None:
    found = translated({"output_dir": "x", "learning_rate": 1e-3, "report_to": "wandb",
                        "run_name": "mine"})  # fmt: skip
    assert found.notes["stages", "optimizer", "lr"] == "learning_rate in 0.json"
    assert found.notes["stages", "optimizer", "weight_decay"] == "transformers' default"
    assert found.notes["stages", "track", "use"] == "report_to in 0.json"
    assert found.notes["stages", "track", "name"] == "run_name in 0.json"
    assert outcome(found, "run_name").to == {"name": "mine", "track.name": "mine"}
    assert found.recipe is not None
    names = [*found.recipe["stages"]]
    assert names.index("track") == names.index("train") - 1
    lora = {"output_dir": "x", "use_peft": True, "lora_target_modules": "all-linear"}
    adapted = translated(lora).recipe
    assert adapted is not None
    assert [*adapted["stages"]][:3] == ["model", "adapter", "precision"]
    arguments = {"output_dir": "x", "per_device_train_batch_size": 4, "max_steps": 1,
                 "gradient_accumulation_steps": 2}  # fmt: skip
    batch = outcome(translated(arguments, procs=4), "gradient_accumulation_steps")
    assert batch.to == {"train.global_batch_size": 32}
    notes = made("axolotl", {"base_model": "org/model", "datasets": [{"path": "a/b"}]}).notes
    assert notes["stages", "checkpoint", "keep"] == "axolotl's default"
    warmup = notes["stages", "optimizer", "warmup_ratio"]
    assert warmup == "axolotl's default, which is 100 steps at most"


def test_an_unknown_key_is_reported_with_its_place() -> None:
    inner = {"stage": 2, "overlap_com": True, "new_feature": {"level": 3}, "old_feature": None}
    found = translated({"output_dir": "x", "learning_rat": 1e-3}, {"zero_optimization": inner})
    unknown = [each for each in found.outcomes if each.outcome == "not translated"]
    assert [(each.file, each.key, each.value, each.hint) for each in unknown] == [
        ("0.json", "learning_rat", 1e-3, "did you mean `learning_rate`?"),
        ("1.json", "zero_optimization.overlap_com", True, "did you mean `overlap_comm`?"),
        ("1.json", "zero_optimization.new_feature", {"level": 3}, ""),
    ]
