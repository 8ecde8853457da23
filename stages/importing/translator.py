"""accelerate's, DeepSpeed's and transformers' files, which together describe one training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.importing import (
    ConfigFile,
    KeyOutcome,
    OtherTool,
    Request,
    Translation,
    Translator,
)
from stages.importing import untranslated
from stages.importing.engines import set_defaults
from stages.importing.meaning import Company, meaning
from stages.importing.reader import (
    ACCELERATE_KIND,
    DEEPSPEED_KIND,
    TABLES,
    TRAINER_KIND,
    Reader,
    kind_of,
)
from stages.importing.recipe import compose
from stages.importing.report import Draft
from stages.importing.script import script_data
from stages.importing.tools import TRANSLATED, advice_on, tool_of

COMPANIES: Mapping[str, Sequence[Company]] = {
    TRAINER_KIND: (
        {},
        {"use_peft": True, "lora_target_modules": "all-linear"},
        {"eval_strategy": "steps"},
        {"dataset_name": "owner/name"},
        {"fsdp": "full_shard"},
    ),
    ACCELERATE_KIND: ({}, {"distributed_type": "FSDP"}, {"distributed_type": "DEEPSPEED"}),
    DEEPSPEED_KIND: ({}, {"zero_optimization": {"stage": 3}}),
}


class HuggingFace(Translator):
    """`accelerate config` files, DeepSpeed JSON and TrainingArguments, alone or together."""

    name = "hugging_face"
    signs = (
        "an accelerate config has `distributed_type` or `num_processes`, a DeepSpeed JSON "
        "`zero_optimization` or `train_batch_size`, and a file of transformers' TrainingArguments "
        "`output_dir` or `per_device_train_batch_size`"
    )

    def kind(self, content: Mapping[str, Any]) -> str | None:
        return kind_of(content)

    def other_tool(self, content: Mapping[str, Any]) -> OtherTool | None:
        name = tool_of(content)
        if name is None or name in TRANSLATED:
            return None
        return OtherTool(name=name, advice=advice_on(name))

    def translate(self, files: Sequence[ConfigFile], request: Request) -> Translation:
        reader = Reader(files)
        for kind in TABLES:
            for file in files:
                if self.kind(file.content) == kind:
                    reader.read(file, kind)
        if DEEPSPEED_KIND in reader.kinds:
            set_defaults(reader.report, alone=TRAINER_KIND not in reader.kinds)
        draft = compose(reader.report, request, files[0].path.stem, script_data)
        return reader.translation(draft)

    def advice(self, key: str, value: Any) -> str:
        return untranslated.advice(key, value)

    def meaning(self, key: str, content: Mapping[str, Any]) -> KeyOutcome | None:
        found = None
        for kind, table in TABLES.items():

            def draft(file: ConfigFile, kind: str = kind) -> Draft:
                reader = Reader([file])
                reader.read(file, kind)
                if DEEPSPEED_KIND in reader.kinds:
                    set_defaults(reader.report, alone=True)
                return compose(reader.report, Request(), "recipe", script_data)

            one = meaning(key, content, table, COMPANIES[kind], draft)
            if one is not None and one.to:
                return one
            found = found or one
        return untranslated.outcome(key, content[key]) or found
