"""`pipe plan`, `pipe advise` and `pipe run --plan`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.state.staging import PASSAGE
from tests.support.forecasts import LLAMA
from tests.support.tier import spread

RECIPES = Path(__file__).parents[3] / "recipes"
FAMILY = [path.name for path in sorted(RECIPES.glob("*.yaml"))]


def pipe(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def planned(*arguments: str | Path) -> dict[str, Any]:
    result = pipe("plan", "--json", *arguments)
    record: dict[str, Any] = json.loads(result.output)
    assert result.exit_code == (0 if record["fits"] in (True, None) else 3)
    return record


@pytest.mark.parametrize("recipe", FAMILY)
def test_every_recipe_can_be_planned(recipe: str) -> None:
    record = planned(RECIPES / recipe)
    phases = ["load", "forward and loss", "backward", "optimizer step", "checkpoint", "resume"]
    assert list(record["device"]) == phases
    assert list(record["host"]) == [*phases, "export"]
    assert record["step"]["work"]["useful"] > 0
    assert {file["what"] for file in record["storage"]} >= {"export"}
    shown = pipe("plan", RECIPES / recipe, "--explain")
    assert shown.exit_code in (0, 3), shown.output
    told = shown.output.split("how these come about")[1]
    items = {item for peak in record["device"].values() for item in peak["items"]}
    for item in items:
        line = next(line for line in told.splitlines() if line.startswith(f"  {item}  "))
        assert line.removeprefix(f"  {item}").strip(), item


def test_a_plan_needs_neither_torch_nor_a_second() -> None:
    code = (
        "import sys, time; t = time.perf_counter()\n"
        "from pipeline.cli import main\n"
        f"main(['plan', {str(RECIPES / 'llama70b_fsdp.yaml')!r}, '--gpu', 'H100'],"
        " standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fits: " in done.stdout


def test_what_does_not_fit_says_what_would() -> None:
    result = pipe("plan", RECIPES / "llama8b_ddp.yaml", "--gpu", "H100")
    assert result.exit_code == 3
    assert "does not fit: " in result.output
    remedy = result.output.split("it would fit with\n")[1].splitlines()[0].strip()
    override = remedy.rsplit("  (", 1)[0].strip("'")
    again = pipe("plan", RECIPES / "llama8b_ddp.yaml", override, "--gpu", "H100")
    assert again.exit_code == 0, again.output


def test_savings_of_the_recipes_own_stages_come_first() -> None:
    recipe = RECIPES / "llama8b_fsdp.yaml"
    result = pipe("plan", recipe, "--memory", "40")
    assert result.exit_code == 3
    lines = result.output.split("it would fit with\n")[1].splitlines()
    assert lines[0].startswith("  'model.activation_checkpointing={}'")


def test_what_would_make_a_recipe_for_cpus_fit_is_for_cpus() -> None:
    result = pipe("plan", RECIPES / "smollm_ddp.yaml", "--host-memory", "7.5")
    assert result.exit_code == 3
    lines = result.output.split("it would fit with\n")[1].splitlines()
    assert "GiB a node)" in lines[0]
    assert "model.activation_checkpointing={}" in lines[0]
    assert not any("--nodes" in line for line in lines)


def test_more_nodes_are_told_with_their_gpus_and_nothing_needless() -> None:
    result = pipe("plan", RECIPES / "llama8b_fsdp.yaml", "--gpus", "4", "--memory", "40")
    assert result.exit_code == 3
    last = result.output.splitlines()[-1]
    assert last.startswith("  --gpus 4 --nodes 2")
    again = ["--gpus", "4", "--nodes", "2", "--memory", "40"]
    changes = [word for word in shlex.split(last.partition("  (")[0]) if "=" in word]
    assert pipe("plan", RECIPES / "llama8b_fsdp.yaml", *changes, *again).exit_code == 0
    for left in range(len(changes)):
        fewer = changes[:left] + changes[left + 1 :]
        assert pipe("plan", RECIPES / "llama8b_fsdp.yaml", *fewer, *again).exit_code == 3


def test_json_says_what_would_make_it_fit() -> None:
    recipe = RECIPES / "llama8b_fsdp.yaml"
    record = planned(recipe, "--gpus", "4", "--memory", "40")
    own, *_, nodes = record["remedies"]
    assert own["options"] == []
    assert own["overrides"][0] == "model.activation_checkpointing={}"
    assert nodes["options"] == ["--gpus", "4", "--nodes", "2"]
    for remedy in record["remedies"]:
        assert remedy["device_bytes"] <= 40 << 30
    again = planned(recipe, *own["overrides"], "--gpus", "4", "--memory", "40")
    assert again["remedies"] == []
    margins, peaks = again["margins"], again["device"].values()
    tensors = max(peak["bytes"] for peak in peaks)
    beside = round(tensors * (1 + margins["fragmentation"])) + margins["overhead"]
    assert own["device_bytes"] == beside
    assert own["host_bytes"] == max(peak["bytes"] for peak in again["host"].values())


def test_json_says_nothing_of_gpus_that_a_remedy_has_not() -> None:
    record = planned(RECIPES / "smollm_ddp.yaml", "--host-memory", "7")
    assert record["remedies"][0]["device_bytes"] is None
    assert record["remedies"][0]["host_bytes"] <= 7 << 30


def test_json_has_both_ends_of_a_steps_time() -> None:
    seconds = planned(RECIPES / "llama8b_fsdp.yaml", "--gpu", "H100")["seconds"]
    assert seconds["least"] == max(seconds["parts"].values()) == seconds["parts"][seconds["bound"]]
    assert seconds["most"] == sum(seconds["parts"].values())


def test_an_average_takes_four_bytes_an_element(tmp_path: Path) -> None:
    recipe = tmp_path / "averaged.yaml"
    base = RECIPES / "llama8b_fsdp.yaml"
    average = "  wrap: {}\n  average: {use: average.ema}\n"
    recipe.write_text(f"extends: {base}\nname: averaged\nstages:\n{average}", "utf-8")
    before, after = planned(base), planned(recipe)
    more = {
        phase: after["device"][phase]["bytes"] - before["device"][phase]["bytes"]
        for phase in before["device"]
    }
    # 8.03e9 over 8 ranks
    assert set(more.values()) == {4 * 8_030_261_248 // 8}
    # and in each checkpoint, which is 12 bytes an element without
    saved = [record["storage"][0]["bytes"] for record in (before, after)]
    assert saved[1] * 12 == saved[0] * 16
    copies = [record["host"]["checkpoint"]["items"][COPY] for record in (before, after)]
    assert copies == [12 * 8_030_261_248, 16 * 8_030_261_248]


def accelerated(file: Path, recipe: str, kind: str, more: str = "") -> dict[str, Any]:
    file.write_text(
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\n"
        f"num_processes: 8\nnum_machines: 1\nmixed_precision: 'no'\n{more}",
        "utf-8",
    )
    slot = json.dumps({"use": "wrap.accelerate", "config": str(file)})
    return planned(RECIPES / recipe, "precision.compute=fp32", f"wrap={slot}")


def test_replicas_of_accelerate_keep_buckets_beside_gradients(tmp_path: Path) -> None:
    found = accelerated(tmp_path / "accelerate.yaml", "llama8b_ddp.yaml", "MULTI_GPU")
    own = planned(
        RECIPES / "llama8b_ddp.yaml", "precision.compute=fp32", "wrap.gradient_as_bucket_view=false"
    )
    n = 8_030_261_248
    assert found["device"]["optimizer step"]["bytes"] == 20 * n
    assert found["device"]["backward"] == own["device"]["backward"]
    # buckets are made when replicas are the same, and ours once more when they are laid out
    assert found["device"]["load"]["bytes"] == 8 * n
    assert own["device"]["load"]["bytes"] == 12 * n


def test_accelerate_shards_what_was_whole_on_the_host(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    fsdp = "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}\n"
    found = accelerated(file, "llama8b_fsdp.yaml", "FSDP", fsdp)
    own = planned(RECIPES / "llama8b_fsdp.yaml", "precision.compute=fp32")
    assert found["device"] == own["device"]
    whole = 8 * 4 * 8_030_261_248
    assert found["host"]["load"]["items"]["models before they are sharded"] == whole
    assert found["host"]["load"]["bytes"] == own["host"]["load"]["bytes"] + whole


@pytest.mark.parametrize(
    ("fields", "what", "number"),
    [
        (["checkpoint.keep=null"], "2 checkpoints, and one more every 100 steps", 2),
        (["checkpoint.keep=null", "train.epochs=null", "train.steps=1000"], "10 checkpoints", 10),
        # 500; 800, 900; and 1000 while it is written
        (
            ["checkpoint.keep_every=500", "train.epochs=null", "train.steps=1000"],
            "4 checkpoints",
            4,
        ),
    ],
)
def test_disk_is_for_every_checkpoint_that_will_be_there(
    fields: list[str], what: str, number: int
) -> None:
    file = planned(RECIPES / "llama70b_fsdp.yaml", *fields)["storage"][0]
    assert file["what"] == what
    assert file["bytes"] == number * 12 * 70_553_706_496


COPY = "copy for checkpoints"


def test_the_copy_for_checkpoints_is_there_once_the_model_is_loaded() -> None:
    """A host that is too small for it is so from the first step on."""
    record = planned(RECIPES / "llama8b_fsdp.yaml", "--gpu", "H100", "--host-memory", "60")
    copies = {phase: peak["items"].get(COPY, 0) for phase, peak in record["host"].items()}
    assert copies.pop("load") == copies.pop("export") == 0
    assert set(copies.values()) == {12 * 8_030_261_248}
    assert [(s["place"], s["phase"]) for s in record["short"]] == [("host", "forward and loss")]


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("llama8b_fsdp", ["checkpoint.asynchronous=false"]),
        ("llama8b_fsdp", ["wrap.cpu_offload=true"]),
        ("llama70b_zero3_offload", []),
        ("llama70b_zero3_offload", ["checkpoint.asynchronous=false"]),
    ],
)
def test_what_waits_for_the_disk_or_is_on_the_host_passes_in_a_bounded_memory(
    recipe: str, overrides: list[str]
) -> None:
    host = planned(RECIPES / f"{recipe}.yaml", *overrides)["host"]
    assert host["checkpoint"]["items"][COPY] == 8 * PASSAGE


def test_a_last_micro_batch_with_fewer_samples_moves_less() -> None:
    def moved(samples: int) -> int:
        """Of 8 ranks, three samples at a time."""
        batch = (f"train.global_batch_size={8 * samples}", "train.micro_batch_size=3")
        size: int = planned(RECIPES / "llama8b_fsdp.yaml", *batch)["step"]["moved"]
        return size

    one = (moved(9) - moved(3)) // 2
    assert moved(8) - moved(3) == one * 5 // 3


def test_a_host_of_which_nothing_was_said_is_not_said_to_suffice() -> None:
    recipe, gpus = RECIPES / "llama8b_fsdp.yaml", ("--gpu", "H100")
    verdict = pipe("plan", recipe, *gpus).output.splitlines()[-1]
    said = re.fullmatch(
        r"fits: \S+ GiB of each GPU to spare, if each node has (\S+) GiB of host memory "
        r"\(--host-memory\)",
        verdict,
    )
    assert said is not None
    known = pipe("plan", recipe, *gpus, "--host-memory", "1000").output.splitlines()[-1]
    assert known.endswith(f" to spare, {1000 - float(said[1]):.1f} GiB of each host's memory")


@pytest.mark.full
def test_more_room_is_taken_into_account() -> None:
    recipe = RECIPES / "llama8b_fsdp.yaml"
    assert planned(recipe, "--memory", "60")["fits"] is True
    assert planned(recipe, "--memory", "60", "--overhead", "20")["fits"] is False
    assert planned(recipe)["fits"] is None


def test_what_is_short_does_not_fit_whatever_else_is_unknown() -> None:
    result = pipe("plan", RECIPES / "llama8b_fsdp.yaml", "--json", "--host-memory", "1")
    record = json.loads(result.output)
    assert result.exit_code == 3
    assert [short["place"] for short in record["short"]] == ["host"]
    assert record["fits"] is False


def test_processes_that_are_not_the_recipes_are_told() -> None:
    recipe = RECIPES / "llama8b_fsdp.yaml"
    told = "the recipe says 8 processes; planned for 16, as asked"
    assert told in pipe("plan", recipe, "--nodes", "2").output
    assert "the recipe says" not in pipe("plan", recipe, "--gpus", "4", "--nodes", "2").output
    assert "the recipe says" not in pipe("plan", recipe, "launch.procs=4").output


def test_ranks_without_samples_are_told() -> None:
    recipe = RECIPES / "llama8b_fsdp.yaml"
    few = (recipe, "train.global_batch_size=6", "train.micro_batch_size=1")
    assert "2 of 8 ranks idle: there is no sample for them in a step" in pipe("plan", *few).output
    assert planned(*few)["idle_ranks"] == 2
    assert planned(recipe)["idle_ranks"] == 0


def test_json_has_no_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    def refused(name: str) -> None:
        raise AssertionError(name)

    file = tmp_path / "plan.json"
    machine = ("--gpu", "H100", "--nvme", "0.001", "--interconnect", "1000000", "--nodes", "2")
    result = pipe(
        "plan", RECIPES / "llama70b_zero3_offload.yaml", "--json", *machine, "--out", file
    )
    for text in (result.output, file.read_text("utf-8")):
        assert json.loads(text, parse_constant=refused)["seconds"]["least"] > 0


ADVISED = {
    "one GPU": ("Qwen/Qwen2.5-0.5B", "--gpus", "1", "--gpu", "H100"),
    "replicated": ("HuggingFaceTB/SmolLM2-135M", "--gpus", "8", "--gpu", "A100"),
    "adapters": ("meta-llama/Llama-3.1-8B", "--gpus", "2", "--gpu", "A100", "--lora"),
    "sharded": ("meta-llama/Llama-3.1-8B", "--gpus", "8", "--gpu", "H100"),
    "small": ("Qwen/Qwen2.5-7B", "--gpus", "8", "--gpu", "A10G", "--lora"),
    "many": ("meta-llama/Llama-3.1-70B", "--gpus", "8", "--nodes", "8", "--gpu", "H100"),
    "hybrid": ("meta-llama/Llama-3.1-8B", "--gpus", "8", "--nodes", "4", "--gpu", "H100"),
    "offloaded": ("meta-llama/Llama-3.1-8B", "--gpus", "1", "--gpu", "H100"),
    "large": ("meta-llama/Llama-3.1-405B", "--gpus", "8", "--nodes", "64", "--gpu", "H200"),
}  # fmt: skip


@pytest.mark.parametrize("case", spread(list(ADVISED), 2))
def test_advice_passes_its_own_check_and_plan(case: str, tmp_path: Path) -> None:
    file = tmp_path / "advised.yaml"
    model, *machines = ADVISED[case]
    result = pipe("advise", model, *machines, "--interconnect", "400g", "--out", file)
    assert result.exit_code == 0, result.output
    assert "chosen  " in result.output
    checked = pipe("check", file)
    assert checked.exit_code == 0, checked.output
    known = [option for option in machines if option != "--lora"]
    assert pipe("plan", file, *known).exit_code == 0


@pytest.mark.full
def test_advice_about_a_model_that_cannot_have_sdpa(tmp_path: Path) -> None:
    file = tmp_path / "advised.yaml"
    # On so few GPUs that its loss would be in chunks, which its capped logits do not allow.
    asked = ("advise", "google/gemma-2-9b", "--gpus", "2", "--gpu", "H100", "--out", file)
    refused = pipe(*asked)
    assert refused.exit_code == 1
    assert "write eager (pipe advise: --attention eager)" in refused.output
    result = pipe(*asked, "--attention", "eager", "--lora")
    assert result.exit_code == 0, result.output
    recipe = yaml.safe_load(file.read_text("utf-8"))
    assert recipe["stages"]["model"]["attention"] == "eager"
    assert "loss_chunk_size" not in result.output


def wrap_of(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "advised.yaml"
    result = pipe("advise", *arguments, "--out", file)
    assert result.exit_code == 0, result.output
    recipe = yaml.safe_load(file.read_text("utf-8"))
    wrap: dict[str, Any] = recipe["stages"]["wrap"]
    return wrap


def test_a_small_model_is_replicated(tmp_path: Path) -> None:
    wrap = wrap_of(tmp_path, "HuggingFaceTB/SmolLM2-135M", "--gpus", "8", "--gpu", "H100")
    assert wrap == {"use": "wrap.ddp"}


@pytest.mark.full
def test_several_nodes_shard_within_each_where_that_fits(tmp_path: Path) -> None:
    model = ("meta-llama/Llama-3.1-8B", "--gpus", "8", "--gpu", "H100", "--micro-batch", "1")
    one = wrap_of(tmp_path, *model)
    (tmp_path / "advised.yaml").unlink()
    assert one["sharding"] == "shard_grad_op"
    assert wrap_of(tmp_path, *model, "--nodes", "4")["sharding"] == "hybrid_shard"


@pytest.mark.full
def test_rejected_ways_are_told_with_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "advised.yaml"
    result = pipe(
        "advise", "meta-llama/Llama-3.1-8B", "--gpus", "8", "--gpu", "H100", "--out", file
    )
    rejected = [line for line in result.output.splitlines() if line.startswith("too much")]
    assert rejected[0] == "too much  ddp: every rank holds everything"
    head = file.read_text("utf-8").split("name:")[0]
    assert "ddp with model.activation_checkpointing={} " in head
    assert "GiB of 79.2 a GPU" in head


def test_advice_does_not_overwrite(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine", "utf-8")
    result = pipe("advise", "Qwen/Qwen2.5-7B", "--gpus", "8", "--gpu", "H100", "--out", file)
    assert result.exit_code == 2
    assert file.read_text("utf-8") == "mine"


def test_advice_about_no_gpu(tmp_path: Path) -> None:
    result = pipe("advise", "Qwen/Qwen2.5-7B", "--gpus", "8", "--out", tmp_path / "x.yaml")
    assert result.exit_code == 2
    assert "--gpu H100, or --memory 80" in result.output
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_no_bug_of_ours(tmp_path: Path) -> None:
    nowhere = tmp_path / "no" / "folder" / "x"
    result = pipe("plan", RECIPES / "smollm_ddp.yaml", "--out", nowhere)
    assert result.exit_code == 2
    assert "No such file or directory" in result.output
    result = pipe("advise", "Qwen/Qwen2.5-7B", "--gpus", "8", "--gpu", "H100", "--out", nowhere)
    assert result.exit_code == 2
    assert "No such file or directory" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./no",), "there is no such model: ./no"),
        (("",), "there is no such model: its name is empty"),
        (("Qwen/Qwen2.5-7B", "--revision", "main"), "'main' is not a commit"),
        (("Qwen/Qwen2.5-7B", "--data", "."), "is a directory"),
    ],
)
def test_mistakes_are_not_taken_for_a_lack_of_memory(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    out = tmp_path / "x.yaml"
    result = pipe("advise", *arguments, "--gpus", "8", "--gpu", "H100", "--out", out)
    assert result.exit_code == 2
    assert message in result.output
    assert "/tmp" not in result.output.replace(str(tmp_path), "")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_hosts_that_are_too_small_are_named(tmp_path: Path) -> None:
    model = ("meta-llama/Llama-3.1-8B", "--gpus", "1", "--out", tmp_path / "x.yaml")
    result = pipe("advise", *model, "--gpu", "RTX 4090", "--host-memory", "48")
    assert result.exit_code == 3
    needs = re.search(r"it takes (\S+) GiB of host memory a node for (\S+), or", result.output)
    assert needs is not None
    assert float(needs[1]) > 48
    assert pipe("advise", *model, "--gpu", "RTX 4090").exit_code == 0


@pytest.mark.full
def test_a_host_that_is_not_known_is_a_condition(tmp_path: Path) -> None:
    result = pipe(
        "advise", "meta-llama/Llama-3.1-8B", "--gpus", "1", "--gpu", "H100",
        "--out", tmp_path / "x.yaml",
    )  # fmt: skip
    lines = result.output.splitlines()
    chosen = lines[next(n for n, line in enumerate(lines) if line.startswith("chosen")) + 1]
    assert re.search(r"if a host has \S+ GiB", chosen)


@pytest.mark.full
@pytest.mark.parametrize(("batch", "said"), [(4096, True), (8, False)])
def test_nodes_that_get_no_sample_are_no_help(batch: int, said: bool, tmp_path: Path) -> None:
    result = pipe(
        "advise", "meta-llama/Llama-3.1-8B", "--gpus", "8", "--memory", "20", "--host-memory", "99",
        "--global-batch", str(batch), "--out", tmp_path / "x.yaml",
    )  # fmt: skip
    assert result.exit_code == 3
    assert ("without offloading it would fit on " in result.output) is said


def test_gpus_without_bf16_compute_in_fp16(tmp_path: Path) -> None:
    out = tmp_path / "x.yaml"
    result = pipe("advise", "Qwen/Qwen2.5-0.5B", "--gpus", "8", "--gpu", "V100", "--out", out)
    assert result.exit_code == 0, result.output
    stages = yaml.safe_load(out.read_text("utf-8"))["stages"]
    assert stages["precision"]["compute"] == "fp16"
    assert pipe("check", out).exit_code == 0


def test_a_small_model_is_given_the_cheaper_savings(tmp_path: Path) -> None:
    out = tmp_path / "x.yaml"
    result = pipe("advise", "meta-llama/Llama-3.2-1B", "--gpus", "8", "--gpu", "H100", "--out", out)
    assert result.exit_code == 0
    stages = yaml.safe_load(out.read_text("utf-8"))["stages"]
    assert stages["wrap"]["use"] == "wrap.ddp"
    assert "activation_checkpointing" not in stages["model"]
    assert stages["train"]["micro_batch_size"] == 4
    assert stages["train"]["loss_chunk_size"] == 1024


@pytest.mark.full
def test_gradients_of_many_micro_batches_are_sent_once(tmp_path: Path) -> None:
    machines = ("--gpus", "8", "--nodes", "2", "--gpu", "H100", "--interconnect", "100gbe")
    wrap = wrap_of(tmp_path, "meta-llama/Llama-3.1-8B", *machines, "--global-batch", "4096")
    assert wrap["sharding"] == "hybrid_shard"
    assert wrap["reduce_every_microbatch"] is False


def test_gpus_without_a_sample_are_told(tmp_path: Path) -> None:
    model = ("Qwen/Qwen2.5-0.5B", "--gpus", "8", "--gpu", "H100", "--out", tmp_path / "x.yaml")
    result = pipe("advise", *model, "--global-batch", "3")
    assert "5 of 8 GPUs without a sample" in result.output


@pytest.mark.parametrize(
    ("beside", "said"), [((), "names no tokenizer"), (("tokenizer.json",), "random weights\n")]
)
def test_a_config_alone_starts_from_random_weights(
    beside: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA), "utf-8")
    for name in beside:
        (tmp_path / name).write_text("{}", "utf-8")
    out = tmp_path / "x.yaml"
    result = pipe("advise", config, "--gpus", "1", "--gpu", "H100", "--out", out)
    assert result.exit_code == 0, result.output
    assert said in result.output
    model = yaml.safe_load(out.read_text("utf-8"))["stages"]["model"]
    assert model.get("tokenizer") == (str(tmp_path) if beside else None)


def test_data_that_is_there_is_kept(tmp_path: Path) -> None:
    data = tmp_path / "advised.example.jsonl"
    mine = json.dumps({"prompt": "a", "completion": "b"}) + "\n"
    data.write_text(mine, "utf-8")
    machine = ("--gpus", "8", "--gpu", "H100", "--out", tmp_path / "advised.yaml")
    for model, code in (("no/such", 1), ("HuggingFaceTB/SmolLM2-135M", 0)):
        assert pipe("advise", model, *machine).exit_code == code
        assert data.read_text("utf-8") == mine


def test_advice_that_comes_to_nothing_leaves_nothing(tmp_path: Path) -> None:
    for model, *machine in (("Qwen/Qwen2.5-7B", "--memory", "1"), ("no/such", "--gpu", "H100")):
        result = pipe("advise", model, "--gpus", "1", *machine, "--out", tmp_path / "x.yaml")
        assert result.exit_code in (1, 3)
        assert not list(tmp_path.iterdir())


def test_a_cpu_computes_in_its_hosts_memory() -> None:
    recipe = RECIPES / "llama8b_fsdp.yaml"
    offload = "wrap.cpu_offload=true"
    there = planned(recipe, offload, "--gpu", "H100")
    # fp32 shards of 8 ranks: up for forward and backward but for the root, gradients down
    root, rest = 2 * 128256 * 4096 + 4096, 6_979_584_000
    assert there["copies"]["up"] == 4 * (root + 2 * rest) // 8 * there["step"]["microbatches"]
    assert {"PCIe to the GPU", "PCIe to the host"} <= set(there["seconds"]["parts"])
    here = planned(recipe, offload, "launch.device=cpu")
    assert here["copies"] == {"up": 0, "down": 0, "disk": 0}
