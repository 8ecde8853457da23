"""Files of accelerate, DeepSpeed and transformers, and the base of tools that have recipes."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from pipeline import UsageError
from pipeline.importing import ConfigFile, KeyOutcome, OtherTool, Request, Translation, Translator
from stages.importing import rules
from stages.importing.draft import Draft
from stages.importing.recipe import TRACKERS, compose
from stages.importing.rules import Rule, RuleResult, Table, is_off, number, outcome, parts, why
from stages.importing.sources import script_data, several

ACCELERATE_KIND = "accelerate config"
DEEPSPEED_KIND = "DeepSpeed configuration"
TRAINER_KIND = "transformers TrainingArguments"
COMPONENT = "_component_"
"""Key of torchtune's blocks."""
Files: TypeAlias = Sequence[tuple[str | None, ConfigFile]]
"""Files, with the kind of each."""
OTHER_METHOD = re.compile(
    r"^(?!.*sft).*(^|[^a-z])(dpo|ipo|kto|orpo|cpo|simpo|apo|ppo|grpo|rloo|rlhf|reward)([^a-z]|$)"
)
"""Names of trainings that TRL's scripts share their keys with; `sft-for-grpo` is one on text."""


def report_to(value: Any) -> RuleResult:
    named = [] if is_off(value) else [each.lower() for each in rules.names(value)]
    ours = [each for each in TRACKERS if each in named]
    others = [each for each in named if each not in (*TRACKERS, "none")]
    fact: dict[str, Any] = {"fact": "report_to", "content": ours} if ours else {}
    if "all" in named:
        return outcome(why("every_tracker"))
    if others or not ours:
        return outcome(why("other_trackers", ", ".join(others)) if others else why("off"), **fact)
    return RuleResult(**fact)


def targets(value: Any) -> list[str] | str:
    """Return the layers of an adapter. Raises WrongValueError for a pattern of their names."""
    if isinstance(value, str) and set(value) & set(r"\[](){}|^$*+?"):
        raise rules.WrongValueError(why("pattern_of_layers"))
    found = rules.names(value)
    return "all-linear" if found == ["all-linear"] else found


def fraction(value: Any) -> float:
    """Return the share of the rows that is held out."""
    if not 0 < (found := number(value)) <= 0.5:
        raise rules.WrongValueError(why("wrong_fraction", value))
    return found


rules.load("words")
TABLES = rules.load(
    "hugging_face", report_to, targets, fraction,
    # A number of steps, or below 1 their share.
    warmup=lambda value: Rule("warmup_ratio number" if 0 < number(value) < 1
                              else "warmup_steps whole")(value),
    steps_or_share=lambda value: (Fraction(str(number(value))) if 0 < number(value) < 1
                                  else rules.positive(value)),
    any=lambda value: value,
    flag=lambda value: int(rules.truth(value)),
    # A bucket of one element is sent after every tensor, and so is a bucket of none.
    count=lambda value: max(rules.whole(value), 1),
    scales={str(power): float(2**power) for power in range(33)},
    also=lambda value: [f"*{name}.*" for name in rules.names(value)],
    one_file=lambda value: [rules.path(value)],
    percentage=lambda value: min(number(value) / 100, 0.5),
    lora_b=lambda value: [{"match": ["*.lora_B.*"], "lr_ratio": number(value)}],
)  # fmt: skip
rules.load("tools")
KINDS = {TRAINER_KIND: "script", ACCELERATE_KIND: "accelerate", DEEPSPEED_KIND: "deepspeed"}
"""Kinds of files, in the order in which they are read -> name of the table."""


def tool_of(content: Mapping[str, Any]) -> OtherTool | None:
    """Return the tool whose file this is; None if no keys show it."""
    found = {*content}
    for key, block in content.items():
        found |= {f"{key}.{name}" for name in block} if isinstance(block, Mapping) else set()
    texts = (text for sign, text in TABLES["signs"].items() if found.issuperset(sign.split("+")))
    own = any(name.endswith(f".{COMPONENT}") for name in found)
    name, _, advice = parts("torchtune" if own else next(texts, ""))
    return OtherTool(name=name, advice=advice) if name else None


def read_all(draft: Draft, files: Files) -> None:
    """Read the files of each kind, and set the defaults of DeepSpeed 0.19."""
    for kind, file in ((kind, file) for kind in KINDS for known, file in files if known == kind):
        draft.kinds.add(kind)
        table, content = {**TABLES[KINDS[kind]]}, file.content
        if kind == ACCELERATE_KIND:
            # `accelerate launch` does not read the keys of another strategy; one key names a file.
            named = {"deepspeed_config_file": _named(draft, file, None, "", "none")}
            table["deepspeed_config"] = {**table["deepspeed_config"], **named}
            used = str(content.get("distributed_type", "NO")).upper()
            for key, engine in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
                other = content.get(key) and used != engine
                table |= unread((key, other, f"distributed_type is {used}"))
        elif kind == TRAINER_KIND:
            if TABLES["sft"].keys() & content.keys():  # a script of TRL
                given = {key for key, value in content.items() if value is not None}
                given |= {"bf16"} if content.get("fp16") else set()
                draft.set_defaults("sft", TABLES["script"], "TRL's default", *given)
            # Those train without `do_train`, and with `do_eval`, which `eval_strategy` sets.
            evaluates = "do_train" in content and is_off(content.get("eval_strategy"))
            asked = ("do_predict", "predict_with_generate", *["do_eval"] * evaluates)
            table |= {**purpose(content, *asked), **trainer(draft, file)}
            for key in ("run_name", "output_dir"):
                if OTHER_METHOD.search(Path(str(content.get(key, ""))).name.lower()):
                    table[key] = Rule(why("other_training", key))
        draft.read(file.path.name, content, table)
    if DEEPSPEED_KIND not in draft.kinds:
        return
    own, alone = "DeepSpeed's default", TRAINER_KIND not in draft.kinds
    steps, scheduled = draft.given("optimizer"), draft.given("deepspeed.schedule")
    cosine = scheduled and draft.value("deepspeed.schedule") == "cosine"
    flat, scaled = alone and steps and not scheduled, draft.value("precision.compute") == "fp16"
    for fact, value, reason, holds in (
        ("optimizer.max_grad_norm", None, own, alone),
        ("optimizer.decay_all", True, "DeepSpeed decays every parameter", steps),
        ("optimizer.weight_decay", 0.0, own, steps),
        ("schedule", "flat", "DeepSpeed's default is a constant rate", flat),
        ("warmup_steps", 1000, own, scheduled),
        ("optimizer.final_lr_ratio", 1e-4, own, cosine),
        ("precision.loss_scale_growth_interval", 1000, own, scaled),
    ):
        draft.default(fact, value, reason, when=holds and not draft.given(fact))


def unread(*keys: tuple[str, Any, str]) -> dict[str, Any]:
    """Return rules for keys that are not read in the company of others: key, whether so, why."""
    return {key: Rule(why("unread", reason)) for key, holds, reason in keys if holds}


def purpose(content: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return a refusal of a file that asks for one of `others` (`do_predict`) and no training."""
    asked = [key for key in others if not is_off(content.get(key))]
    refused = dict.fromkeys(asked[:1], TABLES["words"]["no_training"])
    return refused if is_off(content.get("do_train")) else {}


def trainer(draft: Draft, file: ConfigFile) -> Table:
    """Set the defaults of TrainingArguments, and return the rules of what they do not read."""
    draft.set_defaults("trainer", TABLES["script"], "transformers' default")
    alone = file.content.get("fsdp_config") and not file.content.get("fsdp")
    return {**unread(("fsdp_config", alone, "fsdp is not set")), **engines(draft, file)}


def engines(draft: Draft, file: ConfigFile) -> Table:
    """Set what the words of the key `fsdp` say, and return the rule of the key `deepspeed` if it
    names a file, or note that it is a block."""
    fsdp, value = file.content.get("fsdp"), file.content.get("deepspeed")
    for word in re.findall("offload|shard_grad_op|hybrid_shard", str(fsdp).lower()):
        fact, content = ("cpu_offload", True) if word == "offload" else ("sharding", word)
        draft.default(f"fsdp.{fact}", content, f"{word} in fsdp")
    draft.kinds |= {DEEPSPEED_KIND} if value and not isinstance(value, str) else set()
    return {"deepspeed": _named(draft, file)} if isinstance(value, str) else {}


def _named(draft: Draft, file: ConfigFile, *none: Any) -> Callable[[Any], RuleResult]:
    """Return the rule of a key that names another file, which must be given too, or is `none`."""
    files = {each.path.name for each in draft.files}
    return lambda value: outcome(
        why("off") if value in none
        else why("separate_file") if Path(str(value)).name in files
        else why("other_file", file.path, value)
    )  # fmt: skip


class TableTranslator(Translator):
    """A translator whose files have tables."""

    tables: ClassVar[Mapping[str, str]]
    """Kind of file that a recipe may have keys of -> name of its table, but for lists of blocks."""

    def kind(self, content: Mapping[str, Any]) -> str | None:
        """Return the kind that most keys are of, if one of them is of no other; else None."""
        known = {
            kind: {  # blocks where the table has blocks, values elsewhere
                key for key, value in content.items() if key in table
                and (isinstance(value, Mapping) != callable(table[key]) or not value)
            }
            for kind, table in ((kind, TABLES[name]) for kind, name in KINDS.items())
        }  # fmt: skip
        shared = Counter(chain.from_iterable(known.values()))
        telling = {key for key, value in content.items() if shared[key] == 1
                   and (key not in TABLES["common"] or isinstance(value, Mapping))}  # fmt: skip
        own = [kind for kind, keys in known.items() if keys & telling and tool_of(content) is None]
        best = max(own, key=lambda kind: len(known[kind]), default=None)
        others = sum(key.startswith((*TABLES["beginnings"],)) for key in content)
        return best if best and 2 * (len(known[best]) + others) >= len(content) else None

    @abstractmethod
    def draft(self, files: Files, request: Request) -> Draft:
        """Return the draft of a recipe that the files make."""

    def translate(self, files: Sequence[ConfigFile], request: Request) -> Translation:
        kinds = [(self.kind(file.content), file) for file in files]
        return self.draft(kinds, request).translation()

    def meaning(self, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        """Return the outcome of the key in a file of one of the kinds, or in a block of it. It is
        read in each of the companies, next to the other keys of the content, until it has a place
        in the recipe; without them only where it contradicts one."""
        first = None
        for kind, table in ((kind, TABLES[name]) for kind, name in self.tables.items()):
            companies, last = json.loads(TABLES["companies"][self.tables[kind]]), None
            others = {name: each for name, each in content.items() if name != key and name in table}
            for more in (others, {}) if others else ({},):
                each = [_having(table, key, content[key], {**one, **more}) for one in companies]
                for name, whole in chain.from_iterable(zip(*each, strict=True)):
                    file = ConfigFile(path=Path("config.yaml"), content=whole)
                    outcomes = self.draft([(kind, file)], Request()).translation().outcomes
                    found = next((one for one in outcomes if one.key == name), None)
                    if found is not None and found.to:
                        return found
                    last = found or last
                if last is not None and last.outcome == "default":
                    break
            first = first or last
        return first


class HuggingFace(TableTranslator):
    """`accelerate config` files, DeepSpeed JSON and TrainingArguments, separately or together."""

    name = "hugging_face"
    signs = (
        "an accelerate config has `distributed_type` or `num_processes`, a DeepSpeed JSON "
        "`zero_optimization` or `train_batch_size`, and a file of transformers' TrainingArguments "
        "`output_dir` or `per_device_train_batch_size`"
    )
    tables = KINDS

    def other_tool(self, content: Mapping[str, Any]) -> OtherTool | None:
        tool, translated = tool_of(content), ("axolotl", "LLaMA-Factory", "torchtune")
        return None if tool is None or tool.name in translated else tool

    def draft(self, files: Files, request: Request) -> Draft:
        draft = Draft([file for _, file in files], request)
        read_all(draft, files)
        return compose(draft, files[0][1].path.stem, script_data)

    def advice(self, key: str, value: Any) -> str:
        pair, own = f"{key}:{'no' if value is False else value}", TABLES["advice"]
        found: str = own.get(pair) or own.get(f"{key}:*") or own.get(key, "")
        if is_off(value) and found is own.get(key):
            found = "leave it out: {value} is the default"
        shown = "..." if isinstance(value, Mapping | list) else value
        return found.format(value=shown if isinstance(shown, str) else json.dumps(value))

    def meaning(self, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        found, to, value = super().meaning(key, content), TABLES["keys"].get(key), content[key]
        if (found and found.to) or to is None:
            return found
        # the beginnings of names, as in Lightning's `deepspeed_stage_3`
        stages = {"ddp": "wrap.ddp", "fsdp": "wrap.fsdp", "deepspeed": "wrap.zero"}
        meant = {
            "wrap.use": next((stages[one] for one in stages if str(value).startswith(one)), None),
            "adapter.use": "adapter.lora" if value else None,
            "adapter.quantize": "nf4" if value else None,
            "data.loss": "completion" if value else "all",
        }
        return KeyOutcome(outcome="translated", to={to: meant.get(to, value)})


class RecipeTranslator(TableTranslator):
    """The recipe of one tool, and the files that belong to it."""

    tool: ClassVar[str]
    """Name of the tool, whose recipes are of the kind `TOOL recipe`."""
    companions: ClassVar[Sequence[str]] = (ACCELERATE_KIND, DEEPSPEED_KIND)
    """Kinds of files that may be given too."""
    table: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        cls.tables, cls.table = {f"{cls.tool} recipe": cls.name}, TABLES[cls.name]

    def kind(self, content: Mapping[str, Any]) -> str | None:
        if (tool := tool_of(content)) and tool.name == self.tool:
            return f"{self.tool} recipe"
        found = super().kind(content)
        return found if found in self.companions else None

    def supports(self, files: Sequence[ConfigFile]) -> bool:
        kinds = [self.kind(file.content) for file in files]
        return all(kinds) and f"{self.tool} recipe" in kinds

    def draft(self, files: Files, request: Request) -> Draft:
        recipe, *more = [file for kind, file in files if kind in self.tables]
        if more:
            both = f"{recipe.path} and {more[0].path}"
            raise UsageError(f"{both} are both recipes of {self.tool}", hint="import one by one")
        draft = Draft([file for _, file in files], request)
        self.read(draft, recipe)
        draft.kinds.add(TRAINER_KIND)  # its defaults hold next to DeepSpeed's, as transformers'
        read_all(draft, files)
        compose(draft, recipe.path.stem, several)
        self.finish(draft)
        return draft

    @abstractmethod
    def read(self, draft: Draft, file: ConfigFile) -> None:
        """Read the tool's recipe, and of the other files those that only this tool has."""

    def finish(self, draft: Draft) -> None:
        """Add what shows in the finished draft only."""


def _having(
    table: Mapping[str, Any], key: str, value: Any, company: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the dotted name of a key wherever the table has it, and the company with it there."""
    if key in table:
        yield key, {**company, key: value}
    for block, inner in table.items():
        if isinstance(inner, Mapping):
            given = company.get(block)
            within = given if isinstance(given, Mapping) else {}
            for name, content in _having(inner, key, value, within):
                yield f"{block}.{name}", {**company, block: content}
