"""`pipe chat` and `pipe generate`: answers are those of transformers on the same folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from pipeline import Written, cli
from pipeline.commands import chat
from pipeline.testing import context
from stages.export import text_model
from stages.export.text_model import LoadedModel
from tests.stages.data.fakes import PLAIN, FakeSource
from tests.support.pipe import Pipe
from tests.support.runs import TINY

TOKENS = 12
SHORT = ("--max-tokens", str(TOKENS))
PROMPT = "Which?"
ROWS = [("Which?", "This one."), ("Who?", "Nobody at all."), ("Where?", "Here.")]
EXPORTS = {
    "consolidate": {"use": "consolidate.stream"},
    "export": {"use": "export.safetensors", "dtype": "fp32"},
}
LORA = {"use": "adapter.lora", "rank": 4, "alpha": 8, "targets": "all-linear"}
STEP_8 = "checkpoints/step-00000008"


def write_recipe(file: Path, **slots: Any) -> Path:
    """Write a recipe; `slots` replace the usual ones, and `adapter` comes after the model."""
    config = {**TINY, "vocab_size": 259, "max_position_embeddings": 256}
    chain: dict[str, Any] = {
        "model": {"use": "model.hf", "config": config, "tokenizer": "./tokenizer"},
        "adapter": None,
        "precision": {"use": "precision.policy", "compute": "fp32"},
        "data": {"use": "data.chat", "files": "./rows.jsonl", "cache": "./cache"},
        "optimizer": {"use": "optimizer.adamw", "lr": 0.01, "schedule": "constant"},
        "wrap": {"use": "wrap.ddp"},
        "checkpoint": {"use": "checkpoint.sharded", "every": 4, "keep": 9},
        "train": {"use": "train.causal_lm", "steps": 8, "global_batch_size": 3},
        **EXPORTS,
        **slots,
    }
    stages = {name: slot for name, slot in chain.items() if slot is not None}
    launch = {"procs": 1, "device": "cpu", "threads": 1}
    file.write_text(json.dumps({"name": "tiny", "launch": launch, "stages": stages}))
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four runs: `whole`, `bare` without an export, and two of an adapter on a model
    in a folder: `adapter`, which exports it, and `merged`, which exports the whole model."""
    folder = tmp_path_factory.mktemp("talk")
    FakeSource(PLAIN, eos="<|e|>").fast.save_pretrained(folder / "tokenizer")
    rows = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in ROWS
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pipe = Pipe(folder / "no plugin", folder)

    def run(name: str, **slots: Any) -> Path:
        recipe = write_recipe(folder / f"{name}.yaml", **slots)
        done = pipe("run", str(recipe), "--run-dir", f"runs/{name}")
        assert done.code == 0, done.stdout + done.stderr
        return folder / "runs" / name

    def copied(source: Path, name: str, exports: dict[str, Any]) -> None:
        """Copy a run without its export, and change how it exports."""
        made = Path(shutil.copytree(source, folder / "runs" / name, symlinks=True))
        shutil.rmtree(made / "export")
        recipe = yaml.safe_load((made / "recipe.yaml").read_text())
        trained = {n: slot for n, slot in recipe["stages"].items() if n not in EXPORTS}
        recipe["stages"] = trained | exports
        (made / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))

    whole = run("whole")
    copied(whole, "bare", {})
    base = {"use": "model.hf", "path": "./runs/whole/export"}
    adapter = run("adapter", adapter=LORA, model=base, export={"use": "export.adapter"})
    copied(adapter, "merged", EXPORTS)
    done = pipe("export", "runs/merged", "--procs", "1")
    assert done.code == 0, done.stderr
    return folder


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def call(*words: str, typed: str = "") -> Result:
    return CliRunner().invoke(cli.main, words, input=typed, catch_exceptions=False)


def said_now(*words: str) -> dict[str, Any]:
    """Return what `pipe generate --json` prints."""
    done = call("generate", *words, "--json", *SHORT)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


said = functools.cache(said_now)
"""The same of runs that do not change."""
tokenizer_of = functools.cache(AutoTokenizer.from_pretrained)


def written_by(
    folder: Path, text: str | list[tuple[str, str]], model: Any = None, **more: Any
) -> tuple[str, int]:
    """Return the text that transformers writes after a text or after messages, the most probable
    tokens, and their number."""
    model = model or AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    if isinstance(text, str):
        asked = tokenizer_of(folder)(text, return_tensors="pt")
    else:
        asked = tokenizer_of(folder).apply_chat_template(
            [{"role": role, "content": content} for role, content in text],
            add_generation_prompt=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
    output = model.generate(**asked, do_sample=False, max_new_tokens=TOKENS, **more)
    ids = output[0, asked["input_ids"].shape[1] :].tolist()
    return str(tokenizer_of(folder).decode(ids, skip_special_tokens=True)), len(ids)


def answer_of(folder: Path, *messages: tuple[str, str]) -> str:
    return written_by(folder, [*messages])[0]


def test_an_answer_is_that_of_transformers_on_the_export(place: Path) -> None:
    export = place / "runs/whole/export"
    found = said("runs/whole", PROMPT)
    trained = found["trained"]
    assert (trained["text"], trained["tokens"]) == written_by(export, [("user", PROMPT)])
    assert (trained["dtype"], trained["device"]) == ("fp32", "cpu")
    assert (found["step"], found["checkpoint"]) == (8, None)
    assert (found["run"], found["export"]) == (str(place / "runs/whole"), str(export))
    assert said("runs/whole/export", PROMPT)["trained"] == trained
    short = said("runs/whole", PROMPT, "--system", "Short.")["trained"]["text"]
    assert short == answer_of(export, ("system", "Short."), ("user", PROMPT))


@pytest.mark.parametrize("run", ["whole", "merged"])
def test_a_checkpoint_answers_as_its_export(place: Path, run: str) -> None:
    from_export = said(f"runs/{run}", PROMPT)["trained"]
    newest = said(f"runs/{run}/{STEP_8}", PROMPT)
    assert newest["trained"] == from_export
    assert newest["step"] == said(f"runs/{run}", PROMPT, "--step", "8")["step"] == 8
    earlier = said(f"runs/{run}", PROMPT, "--step", "4")
    assert earlier["step"] == 4
    done = Pipe(place, place)("export", f"runs/{run}", "--step", "4", "--procs", "1")
    assert done.code == 0, done.stderr
    exported = place / f"runs/{run}/export-step-4"
    try:
        assert earlier["trained"]["text"] == answer_of(exported, ("user", PROMPT))
    finally:
        shutil.rmtree(exported)


def test_a_checkpoint_that_nobody_exports_is_read(place: Path) -> None:
    found = said_now("runs/bare", PROMPT)
    assert found["checkpoint"] == str(place / "runs/bare" / STEP_8)
    assert not list((place / "runs/bare").glob("export*"))
    done = Pipe(place, place)("export", "runs/bare", "--procs", "1")
    assert done.code == 0, done.stderr
    exported = place / "runs/bare/export"
    expected = answer_of(exported, ("user", PROMPT))
    assert said_now("runs/bare", PROMPT)["export"] == str(exported)
    shutil.rmtree(exported)
    assert (found["trained"]["text"], found["trained"]["dtype"]) == (expected, "bf16")


def test_an_adapter_answers_on_its_base(place: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    folder = place / "runs/adapter/export"
    model = AutoPeftModelForCausalLM.from_pretrained(folder)
    found = said("runs/adapter", PROMPT, "--beside")
    assert found["trained"]["text"] == written_by(folder, [("user", PROMPT)], model)[0]
    base = said("runs/whole", PROMPT)["trained"]["text"]
    assert found["base"]["text"] == base != found["trained"]["text"]
    shutil.copytree(folder, place / "moved")
    assert said("moved", PROMPT)["trained"]["text"] == found["trained"]["text"]
    refused = call("generate", "moved", PROMPT, "--beside")
    assert refused.exit_code == 2
    assert "moved does not lie in a run, so its base model is not known" in refused.stderr


OTHER = (
    "{% for m in messages %}[{{ m.content }}]<|s|>{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
"""A template with other ends of turns than that of the base."""


def test_an_adapter_outside_its_run_speaks_as_it_was_trained(place: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    folder = tmp_path / "adapter"
    shutil.copytree(place / "runs/adapter/export", folder)
    (folder / "export.json").unlink()
    (folder / "chat_template.jinja").write_text(OTHER)
    end = tokenizer_of(folder).convert_tokens_to_ids("<|s|>")
    model = AutoPeftModelForCausalLM.from_pretrained(folder)
    before = model.generation_config.eos_token_id
    ends = [*(before if isinstance(before, list) else [before]), end]
    found = said(str(folder), PROMPT)["trained"]
    expected = written_by(folder, f"[{PROMPT}]<|s|>:", model, eos_token_id=ends)
    assert (found["text"], found["tokens"]) == expected
    for opened, has in ((folder, True), (place / "runs/whole/export", False)):
        loaded = text_model.open_folder(opened, context(tmp_path), None, trust_remote_code=False)
        assert (end in loaded._ends) == has
        assert loaded._ends >= set(ends) or not has
        loaded.close()


def test_an_adapter_on_an_adapter_is_refused(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(place / "runs/adapter/export", folder)
    (folder / "export.json").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    for base in (folder, place / "runs/adapter/export"):
        named = json.dumps(config | {"base_model_name_or_path": str(base)})
        (folder / "adapter_config.json").write_text(named)
        done = call("generate", str(folder), PROMPT)
        assert done.exit_code == 2
        assert f"{folder} is an adapter, and its base ({base}) is one too" in done.stderr


def test_texts_of_a_model_command_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: Any, messages: Any, how: Any, show: Callable[[str], object]) -> Written:
        text = "\x1b]0;owned\x07\rone\ttwo\n\x1b[2Jthree"
        for piece in text.splitlines(keepends=True):
            show(piece)
        return Written(text=text, tokens=3, ended=True)

    monkeypatch.setattr(LoadedModel, "answer", answer)
    shown = "\\u001b]0;owned\\u0007\\u000done\ttwo\n\\u001b[2Jthree\n"
    assert call("generate", "runs/whole", PROMPT).stdout == shown
    done = call("chat", "runs/whole", typed="Wh\x1b[2Jo?\n")
    assert done.stdout == f"> Wh\\u001b[2Jo?\n{shown}"


@pytest.mark.parametrize("run", [["whole"], ["whole", "--step", "8"], ["moved"]])
def test_templates_get_their_processes_before_the_weights(
    place: Path, monkeypatch: pytest.MonkeyPatch, run: list[str]
) -> None:
    """A process is a copy of this one."""
    order: list[str] = []

    def noted(holder: Any, name: str, what: str) -> None:
        real = getattr(holder, name)

        def note(*args: Any, **options: Any) -> Any:
            order.append(what)
            return real(*args, **options)

        monkeypatch.setattr(holder, name, note)

    shutil.copytree(place / "runs/adapter/export", place / "runs/moved")
    noted(os, "fork", "process")
    noted(text_model, "loaded", "weights")
    noted(torch.nn.Module, "load_state_dict", "weights")
    done = call("chat", f"runs/{run[0]}", *run[1:], "--max-tokens", "2", typed="Who?\nWho?\n")
    shutil.rmtree(place / "runs/moved")
    assert done.exit_code == 0, done.output
    assert order[0] == "process"
    assert "process" not in order[order.index("weights") :]


def test_each_tensor_is_put_where_it_belongs_without_a_search(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visited: list[str] = []
    load = torch.nn.Module._load_from_state_dict

    def visit(self: torch.nn.Module, *args: Any) -> None:
        visited.append(type(self).__name__)
        load(self, *args)

    monkeypatch.setattr(torch.nn.Module, "_load_from_state_dict", visit)
    said_now("runs/whole", PROMPT, "--step", "8")
    assert len(visited) == len(load_file(place / "runs/whole/export/model.safetensors"))


@pytest.mark.parametrize("words", [["chat", "runs/whole"], ["generate", "runs/whole", PROMPT]])
def test_a_model_that_a_gpu_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    done = call(*words)
    assert done.exit_code == 2
    assert "the model does not fit on cpu" in done.stderr


def test_the_base_answers_next_to_it() -> None:
    done = call("generate", "runs/whole", PROMPT, "--beside", *SHORT)
    found = said("runs/whole", PROMPT, "--beside")
    trained, base = found["trained"]["text"], found["base"]["text"]
    assert trained != base
    assert done.stdout == f"trained:\n{trained}\nbase:\n{base}\n"
    assert "base: the model before training, fp32, cpu" in done.stderr
    by_checkpoint = said("runs/whole", PROMPT, "--beside", "--step", "8")
    assert by_checkpoint["base"] == found["base"]


def test_a_chat_keeps_what_was_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[tuple[str, str]]] = []
    answer = LoadedModel.answer

    def listen(self: LoadedModel, messages: Any, *others: Any) -> Any:
        asked.append([(one["role"], one["content"]) for one in messages])
        return answer(self, messages, *others)

    monkeypatch.setattr(LoadedModel, "answer", listen)
    export = place / "runs/whole/export"
    first = answer_of(export, ("user", "Which?"))
    turns = [("user", "Which?"), ("assistant", first), ("user", "Who?")]
    second, again = answer_of(export, *turns), answer_of(export, ("user", "Who?"))
    typed = "Which?\nWho?\n/nothing\n/reset\nWho?\n/exit\nnever read\n"
    done = call("chat", "runs/whole", *SHORT, typed=typed)
    assert done.exit_code == 0, done.output
    lines = ["> Which?", first, "> Who?", second, "> /nothing", "> /reset", "> Who?", again]
    assert done.stdout.splitlines() == "\n".join([*lines, "> /exit"]).splitlines()
    assert asked == [turns[:1], turns, turns[2:]]
    assert "there is no /nothing, only /reset and /exit" in done.stderr


@pytest.mark.parametrize("room", [True, False])
def test_a_chat_with_both(monkeypatch: pytest.MonkeyPatch, *, room: bool) -> None:
    opened: list[int] = []
    loaded, close = LoadedModel.__init__, LoadedModel.close

    def count(self: LoadedModel, *args: Any) -> None:
        opened.append(1)
        loaded(self, *args)

    def uncount(self: LoadedModel) -> None:
        opened.append(-1)
        close(self)

    found = said("runs/whole", PROMPT, "--beside")
    monkeypatch.setattr(LoadedModel, "__init__", count)
    monkeypatch.setattr(LoadedModel, "close", uncount)
    monkeypatch.setattr(LoadedModel, "has_room", lambda _: room)
    typed = f"{PROMPT}\n/reset\n{PROMPT}\n"
    done = call("chat", "runs/whole", "--beside", *SHORT, typed=typed)
    assert done.exit_code == 0, done.output
    both = f"trained:\n{found['trained']['text']}\nbase:\n{found['base']['text']}\n"
    assert done.stdout == f"> {PROMPT}\n{both}> /reset\n> {PROMPT}\n{both}"
    assert done.stderr.count("loaded in turn") == (0 if room else 1)
    counts = [sum(opened[: n + 1]) for n in range(len(opened))]
    assert max(counts[: 8 if not room else 2]) == (2 if room else 1)


def test_texts_are_drawn_by_the_seed() -> None:
    drawn = [said_now("runs/whole", PROMPT, "--temperature", "3", "--seed", seed)["trained"]
             for seed in ("1", "1", "2")]  # fmt: skip
    assert drawn[0]["text"] == drawn[1]["text"] != drawn[2]["text"]


def test_a_text_is_continued_without_a_template(place: Path, tmp_path: Path) -> None:
    export = place / "runs/whole/export"
    expected, _ = written_by(export, PROMPT)
    done = call("generate", "runs/whole", PROMPT, "--plain", *SHORT)
    assert done.stdout == f"{expected}\n"
    assert "--plain, so each text is continued separately" in done.stderr
    bare = tmp_path / "base"
    shutil.copytree(export, bare)
    for name in ("chat_template.jinja", "export.json"):
        (bare / name).unlink()
    done = call("generate", str(bare), "-", *SHORT, typed=PROMPT)
    assert done.stdout == f"{expected}\n"
    assert "no chat template, so each text is continued separately" in done.stderr


def test_the_newest_run_is_taken_and_said(place: Path) -> None:
    (place / "runs/bare/journal.jsonl").touch()
    done = call("generate", PROMPT, "--max-tokens", "3")
    assert done.exit_code == 0, done.output
    assert "run: runs/bare\n" in done.stderr
    assert f"trained: step 8, runs/bare/{STEP_8}, bf16, cpu\n" in done.stderr
    assert "cut after 3 tokens; --max-tokens allows more" in done.stderr


def test_a_text_ends_with_the_table_of_positions(place: Path, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=259, n_positions=24, n_embd=8, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    shutil.copytree(place / "tokenizer", tmp_path / "gpt2", dirs_exist_ok=True)
    found = said(str(tmp_path / "gpt2"), "x" * 20, "--plain")
    assert found["trained"]["tokens"] == 4
    done = call("generate", str(tmp_path / "gpt2"), "x" * 30, "--plain")
    assert done.exit_code == 1
    assert "the text has 30 tokens, and the model has 24 positions" in done.stderr


MISTAKES = [
    ("chat nowhere", "nowhere is not there"),
    ("generate runs/whole A --step 5", "has no checkpoint of step 5; it has 4, 8"),
    ("chat runs/whole --step best", "no checkpoint of runs/whole has a loss"),
    ("chat runs/whole/export --step 4", "--step is for a run, and runs/whole/export is not a run"),
    ("chat tokenizer", "tokenizer is not a run, an export or a checkpoint"),
    ("chat runs/whole --device cuda:9", "--device: there is no cuda:9"),
    ("chat runs/whole --device tpu", "--device: tpu"),
    ("generate runs/whole", "the prompt is missing: runs/whole is a folder"),
    ("generate runs/whole --json", "the prompt is missing: runs/whole is a folder"),
    ("generate runs/whole one two", "at most a run and one prompt"),
]


def test_mistakes_are_named(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def require(words: str, message: str) -> None:
        done = call(*words.split())
        assert done.exit_code == 2, done.output
        assert message in done.stderr.replace(f"{place}/", "")

    for words, message in MISTAKES:
        require(words, message)
    empty = tmp_path / "runs/started"
    empty.mkdir(parents=True)
    shutil.copyfile(place / "runs/whole/recipe.yaml", empty / "recipe.yaml")
    monkeypatch.chdir(tmp_path)
    require("chat", "runs/started has nothing to talk to: no export, no checkpoint")
    monkeypatch.chdir(empty)
    require(f"generate {PROMPT}", "there is no run in runs")


@contextlib.contextmanager
def changed(file: Path, content: bytes | None) -> Iterator[None]:
    """Change a file, or take it away."""
    before = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damaged_exports_are_refused(place: Path, name: str) -> None:
    file = place / "runs/whole/export" / name
    for content, message in ((None, "is missing"), (file.read_bytes()[:-9], "")):
        with changed(file, content):
            done = call("generate", "runs/whole", PROMPT)
        assert done.exit_code == 2
        assert f"runs/whole/export is damaged: {name} {message}" in done.stderr


def test_an_export_that_was_edited_is_read(place: Path) -> None:
    file = place / "runs/whole/export/generation_config.json"
    edited = json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 100.0})
    before = said("runs/whole", PROMPT)["trained"]["text"]
    with changed(file, edited.encode()):
        done = call("generate", "runs/whole", PROMPT, *SHORT)
    assert done.exit_code == 0
    assert "changed after it was written: generation_config.json" in done.stderr
    assert done.stdout.strip() != before


@pytest.mark.parametrize(
    ("run", "safe", "pickled"),
    [
        ("whole", "model.safetensors", "pytorch_model.bin"),
        ("adapter", "adapter_model.safetensors", "adapter_model.bin"),
    ],
)
def test_pickles_are_not_read(
    place: Path, tmp_path: Path, run: str, safe: str, pickled: str
) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(place / f"runs/{run}/export", folder)
    torch.save(load_file(folder / safe), folder / pickled)
    for name in (safe, "export.json"):
        (folder / name).unlink()
    done = call("generate", str(folder), PROMPT)
    assert done.exit_code == 2
    assert "holds no safetensors files (pickles are not read" in done.stderr
    if run == "adapter":  # whose weights are not those next to it
        shutil.copyfile(place / "runs/whole/export/model.safetensors", folder / "model.safetensors")
    else:
        names = dict.fromkeys(torch.load(folder / pickled, weights_only=True), pickled)
        index = json.dumps({"metadata": {}, "weight_map": names})
        (folder / "model.safetensors.index.json").write_text(index)
    again = call("generate", str(folder), PROMPT)
    assert (again.exit_code, again.stderr) == (2, done.stderr)


def test_ctrl_c_ends_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def interrupt(piece: str) -> None:
        shown.append(piece)
        if not piece.startswith("> "):
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_show", interrupt)
    done = call("chat", "runs/whole", "--max-tokens", "20", typed="Who?\nWho?\n")
    assert done.exit_code == 0, done.output
    assert "stopped: this message and its answer are dropped" in done.stderr
    assert len(shown) > 1
