"""LLaMA-Factory's YAML recipes (`llamafactory-cli train`), as of version 0.9.5."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.importing import ConfigFile
from pipeline.utils import did_you_mean
from stages.importing import rules
from stages.importing.draft import Draft
from stages.importing.hugging_face import RecipeTranslator, purpose, trainer, unread
from stages.importing.rules import Rule, Table, outcome, why
from stages.importing.sources import HELD, RUNNING, TRAIN

OWN = "LLaMA-Factory's default"
ADDRESSES = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"}
"""Every entry of a dataset_info.json has one of these keys."""
NAMES = {"dataset": TRAIN, "eval_dataset": HELD}
"""Keys with names of data sets -> beginning of their facts."""
PROBS = "interleave_probs"


def adapter_folder(value: Any) -> str:
    """Return the folder of an adapter. Raises WrongValueError for several."""
    if len(rules.names(value)) != 1:
        raise rules.WrongValueError("refused merges several adapters !! merge them first")
    return rules.path(value)


TABLES = rules.load(
    "llama_factory", adapter_folder,
    all_or_names=lambda value: found if (found := rules.names(value)) != ["all"] else "all-linear",
)  # fmt: skip


class LlamaFactory(RecipeTranslator):
    """A recipe of LLaMA-Factory, with its dataset_info.json and its DeepSpeed JSON."""

    name = "llama_factory"
    tool = "LLaMA-Factory"
    signs = "a recipe of LLaMA-Factory has `finetuning_type` or `cutoff_len`"

    def kind(self, content: Mapping[str, Any]) -> str | None:
        return "data sets of LLaMA-Factory" if _is_info(content) else super().kind(content)

    def read(self, draft: Draft, file: ConfigFile) -> None:
        content, running = {**file.content}, file.content.get("stage") == "pt"
        folder: Any = content.get("dataset_dir", "data")
        infos = [(each.path.name, each.content) for each in draft.files if _is_info(each.content)]
        infos = [(file.path.name, folder), *infos] if isinstance(folder, Mapping) else infos
        entries: dict[str, tuple[str, Mapping[str, Any]]] = {  # the file, and what it says
            name: (info, entry) for info, inner in infos
            for name, entry in inner.items() if isinstance(entry, Mapping)
        }  # fmt: skip
        online, place = folder == "ONLINE", folder if isinstance(folder, str) else "data"
        table = self.table | unread(
            ("template", running and content.get("template"), "stage: pt takes the text as it is")
        )
        table |= purpose(content, "do_predict", "predict_with_generate", "do_eval")
        table |= trainer(draft, file)
        named: dict[str, str] = {}
        for key, kind in NAMES.items():
            if content.get(key):
                try:
                    names = rules.names(content[key])
                    named |= {f"{kind}{number}.": name for number, name in enumerate(names)}
                    known = dict.fromkeys(names) if online else entries
                    text = _named(draft, names, known, f"{file.path} {place}/dataset_info.json")
                except rules.WrongValueError as error:
                    text = str(error)
                table[key] = Rule(text)
        if weighed := str(content.get("mix_strategy")) == "interleave_over":
            value: Any = content.get(PROBS)
            shares = value.split(",") if isinstance(value, str) else value
            if isinstance(shares, list) and shares:  # a key for each share
                del content[PROBS]
                each = [f"{PROBS}[{number}]" for number in range(len(shares))]
                content |= dict(zip(each, shares, strict=True))
                table |= {key: Rule(f"{TRAIN}{n}.weight number") for n, key in enumerate(each)}
            elif value:
                table[PROBS] = Rule(why("no_shares", value))
        draft.read(file.path.name, content, table)
        for one, name in named.items():
            shared = weighed and one.startswith(TRAIN)
            draft.default(f"{one}weight", 1.0, "interleave_over takes turns", when=shared)
            draft.default(f"{one}path", name, f"dataset in {file.path.name}", when=online)
            if online or name in entries:
                info, entry = ("", {}) if online else entries[name]
                draft.read(info, entry, _rows(draft, entry, one, place, running), f"{name}.", one)
        for name, (info, entry) in entries.items():
            if name not in named.values():
                draft.enter(info, name, entry, outcome(why("other_sets")))
        again = rules.is_off(content.get("disable_gradient_checkpointing"))
        draft.default("model.activation_checkpointing", {}, OWN, when=again)
        draft.set_defaults("llama_factory", self.table, OWN)
        _set_defaults(draft, running)


def _set_defaults(draft: Draft, running: bool) -> None:
    alpha = float(2 * draft.value("adapter.rank"))
    draft.default("adapter.alpha", alpha, "twice lora_rank, LLaMA-Factory's default")
    pure = draft.given("precision.master")
    draft.default("precision.compute", "bf16", "pure_bf16 in the recipe", when=pure)
    neat = draft.value("neat", False)
    packed = neat or draft.value("packing", False)
    length = draft.value("cutoff") - (1 if packed else 0)
    less = "LLaMA-Factory packs one token less than cutoff_len"
    draft.rename("cutoff", "data.sequence_length", content=length)
    draft.default("data.sequence_length", length, less if packed else OWN)
    if running:
        draft.default("data.prepend_bos", False, "LLaMA-Factory joins texts without a start token")
        draft.drop(why("joined_rows"), "packing", when=draft.given("packing") and not packed)
    elif neat:
        draft.rename("neat", "data.packing")
        draft.drop(why("idle"), "packing")
    elif packed:
        draft.drop(why("visible_rows"), "packing")


def _is_info(content: Mapping[str, Any]) -> bool:
    entries = [isinstance(one, Mapping) and ADDRESSES & one.keys() for one in content.values()]
    return bool(entries) and all(entries)


def _named(draft: Draft, names: list[str], known: Mapping[str, Any], both: str) -> str:
    """Return the outcome of a key that names data sets."""
    missing = [name for name in names if name not in known]
    if draft.request.data:
        return why("replaced", "--data")
    if missing and known:
        return why("unknown_set", missing[0], did_you_mean(missing[0], [*known])).rstrip()
    return why("no_info", both) if missing else why("said_by_sets")


def _rows(draft: Draft, entry: Mapping[str, Any], one: str, folder: str, running: bool) -> Table:
    """Return the rules of an entry, and set its defaults. `running` text is trained on as it is."""
    draft.default(f"{one}style", RUNNING, "stage: pt", when=running)
    draft.default(f"{one}text_key", "instruction", OWN, when=running)
    draft.default(f"{one}style", "alpaca", OWN)
    draft.default(f"{one}form", "sharegpt", OWN, when=not running)
    tags = entry.get("tags")
    openai = isinstance(tags, Mapping) and tags.get("role_tag") == "role"
    parts = ["openai" if openai else "sharegpt", *["mirrored"] * ("hf_hub_url" in entry),
             *["running"] * running]  # fmt: skip
    in_folder = {"in_folder": lambda name: str(Path(folder, name).absolute())}
    found = {**TABLES["entry"], "file_name": Rule(".path in_folder", in_folder)}
    for key, row in (pair for part in parts for pair in TABLES[part].items()):
        found[key] = {**found.get(key, {}), **row} if isinstance(row, Mapping) else row
    return found
