"""accelerate's, DeepSpeed's and transformers' files, which together describe one training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.importing import ConfigFile, OtherTool, Request, Translation, Translator
from stages.importing.engines import set_defaults
from stages.importing.reader import DEEPSPEED_KIND, TABLES, TRAINER_KIND, Reader, kind_of
from stages.importing.recipe import compose
from stages.importing.script import script_data
from stages.importing.tools import TRANSLATED, advice_on, tool_of


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
