"""Everything next to the weights that transformers needs to load a model: read, and saved."""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import StageError
from stages.model import compat
from stages.model.chat_template import read_template, unknown_tokens
from stages.model.config_checks import wrong_size
from stages.model.files import Files, local, read_json
from stages.model.gguf import GgufTensors, quick_gguf
from stages.model.settings import HfSettings

if TYPE_CHECKING:
    from logging import Logger

LOCAL_KEYS = (
    "_name_or_path", "_model_name_or_path", "name_or_path", "is_local", "local_files_only",
    "gguf_file",
)  # fmt: skip
"""Keys in which transformers notes where it read from."""
PROCESSOR = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "image_processor_config.json", "feature_extractor_config.json",
)  # fmt: skip
"""Files by which transformers prepares what is not text."""
OLD_SPELLINGS = (
    "head_dim", "rope_theta", "rope_scaling", "torch_dtype", "partial_rotary_factor",
    "rope_local_base_freq", "sliding_window_pattern", "rotary_pct", "rotary_emb_base",
)  # fmt: skip
"""Keys that architectures read without declaring them, or translate."""


def save_configs(
    config: Any, source: Path | None, folder: Path, *, architecture: str, dtype: str
) -> None:
    """Write config.json, with `dtype` as torch spells it (`bfloat16`), and generation_config.json:
    the source's own, else what the config implies."""
    from transformers import GenerationConfig

    own = source / "generation_config.json" if source else None
    if own is not None and own.is_file():
        # Copied: transformers refuses to save some settings that published models have.
        shutil.copyfile(own, folder / own.name)
    else:
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    config = copy.deepcopy(config)
    config.architectures = [architecture]
    config.dtype = dtype
    config.save_pretrained(folder)
    _drop_keys(folder / "config.json", "quantization_config")


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer and its chat template."""
    tokenizer.save_pretrained(folder)
    _drop_keys(folder / "tokenizer_config.json")


def _drop_keys(file: Path, *keys: str) -> None:
    """Take these keys, and LOCAL_KEYS, from a JSON file, if it is there."""
    if file.is_file():
        content = json.loads(file.read_text("utf-8"))
        kept = {key: value for key, value in content.items() if key not in (*LOCAL_KEYS, *keys)}
        file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_files(source: Path | None, folder: Path, *, processor: bool, code: bool) -> None:
    """Copy what came with the source: the files by which a model of more than text prepares the
    rest, and the model's code. Raises StageError for code without a source."""
    if source is None:
        if code:
            raise StageError("the model's code is in no folder that it could be copied from")
        return
    named = [source / name for name in PROCESSOR if processor and (source / name).is_file()]
    for file in (*named, *(sorted(source.glob("*.py")) if code else ())):
        shutil.copyfile(file, folder / file.name)


def config_of_recipe(config: Mapping[str, Any] | str) -> Any:
    """Return a transformers config of a mapping, or of a config.json at a path.

    Raises StageError if it cannot be used, also for keys of a mapping that the architecture does
    not know: transformers would keep them and use its default.
    """
    from transformers import AutoConfig

    spelled_out = not isinstance(config, str)
    values = read_json(local(config)) if isinstance(config, str) else dict(config)
    kind = values.pop("model_type", None)
    with _unusable():
        if spelled_out:
            default = AutoConfig.for_model(kind)
            known = {*default.to_dict(), *default.attribute_map, *OLD_SPELLINGS}
            for key in (key for key in values if key not in known):
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else ""
                raise StageError(f"a {kind} config has no key {key!r}", hint=hint)
        _require_sizes(values)
        return AutoConfig.for_model(kind, **values)


def config_of_files(files: Files, *, trust_remote_code: bool) -> Any:
    """Return the config of a folder or GGUF file. Raises StageError if it cannot be trained."""
    from transformers import AutoConfig

    if files.gguf is not None:
        GgufTensors(files.folder / files.gguf).close()  # is it there as a whole?
    with _unusable(), quick_gguf(files.gguf):
        config = AutoConfig.from_pretrained(
            files.folder,
            gguf_file=files.gguf,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
    _require_sizes(config.to_dict())
    if getattr(config, "quantization_config", None) is not None:
        raise StageError(
            f"the weights in {files} are quantized and cannot be trained",
            hint="use the unquantized model",
        )
    return config


@contextlib.contextmanager
def _unusable() -> Iterator[None]:
    from huggingface_hub.errors import StrictDataclassError as Strict

    try:
        with compat.quiet():
            yield
    except (OSError, ValueError, LookupError, TypeError, ImportError, Strict) as error:
        raise StageError(f"the model's config cannot be used: {error}") from error


def _require_sizes(config: Mapping[str, Any]) -> None:
    if wrong := wrong_size(config):
        raise StageError(f"the model's config cannot be used: {wrong}")


def open_tokenizer(files: Files, stage: HfSettings, log: Logger) -> Any:
    """Return the tokenizer of files, with the recipe's chat template. Raises StageError."""
    from transformers import AutoTokenizer

    try:
        with compat.quiet(), quick_gguf(files.gguf):
            tokenizer = AutoTokenizer.from_pretrained(
                files.folder,
                gguf_file=files.gguf,
                trust_remote_code=stage.trust_remote_code,
                local_files_only=True,
            )
    except (OSError, ValueError, ImportError, KeyError, IndexError) as error:
        raise StageError(f"the tokenizer in {files} cannot be loaded: {error}") from error
    if stage.chat_template is not None:
        tokenizer.chat_template = read_template(stage.chat_template)
        for token in unknown_tokens(tokenizer.chat_template, tokenizer):
            log.warning(
                "the chat template writes %s, which is not a token of the tokenizer: it becomes "
                "several tokens, and generation does not stop at it",
                token,
            )
    return tokenizer


def open_processor(files: Files, stage: HfSettings, tokenizer: Callable[[], Any]) -> Any | None:
    """Return the processor of a folder, with the recipe's tokenizer; None in a folder or GGUF file
    that has none. Raises StageError, which says what is missing, if it cannot be loaded."""
    if files.gguf or not any((files.folder / name).is_file() for name in PROCESSOR):
        return None
    from transformers import AutoProcessor, ProcessorMixin

    try:
        with compat.quiet():
            processor = AutoProcessor.from_pretrained(
                files.folder, trust_remote_code=stage.trust_remote_code, local_files_only=True
            )
    except (OSError, ValueError, ImportError, LookupError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise StageError(f"the processor in {files} cannot be loaded: {reason}") from error
    if not isinstance(processor, ProcessorMixin):  # the tokenizer, for want of another
        raise StageError(f"{files} has no processor that transformers can load")
    processor.tokenizer = tokenizer()
    if stage.chat_template is not None:
        processor.chat_template = processor.tokenizer.chat_template
    return processor
