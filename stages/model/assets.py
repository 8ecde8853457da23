"""Everything next to the weights that transformers needs to load a model: config, tokenizer, chat
template, processor, model code; read, saved, and aligned: the ids of begin, end and padding, as
transformers' Trainer aligns them, and the tokens that end a turn.

Importing this imports no torch."""

from __future__ import annotations

import contextlib
import copy
import difflib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import StageError
from pipeline.utils import did_you_mean, expanded
from stages.model import compat
from stages.model.config_checks import wrong_size
from stages.model.files import Files, is_local, read_json
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

MARKERS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Beginning and end of what a template marks as the assistant's."""
_FOLDER = Path(__file__).parent / "templates"
_TOKEN = re.compile(r"<[|｜][^\s<>{}]+?[|｜]>|<(?:start|end)_of_turn>")
_LARGEST = 1 << 20
"""Bytes."""
_ANSWER = "answer"
_TURNS = (("user", "question"), ("assistant", _ANSWER))


def save_files(
    config: Any, model: Any, source: Path | None, folder: Path, dtype: str, *, processor: bool
) -> None:
    """Write config.json of `model`, with `dtype` as torch spells it (`bfloat16`), and
    generation_config.json: the source's own, else what the config implies. Copy what came with the
    source: the files by which a model of more than text prepares the rest, and the model's code.
    Raises StageError for code without a source."""
    from transformers import GenerationConfig

    code = compat.is_remote_code(model)
    if source is None and code:
        raise StageError("the model's code is in no folder that it could be copied from")
    # Copied: transformers refuses to save some settings that published models have.
    names = ["generation_config.json", *(PROCESSOR if processor else ())]
    copied = [source / name for name in names if (source / name).is_file()] if source else []
    copied += sorted(source.glob("*.py")) if source and code else []
    for file in copied:
        shutil.copyfile(file, folder / file.name)
    if not (source and (source / names[0]).is_file()):
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    config = copy.deepcopy(config)
    config.architectures, config.dtype = [type(model).__name__], dtype
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


def open_config(stage: HfSettings, files: Files | None) -> Any:
    """Return a transformers config of the mapping or config.json in the slot's `config`, or else of
    a folder or GGUF file.

    Raises StageError if it cannot be used or trained, also for keys of a mapping that the
    architecture does not know: transformers would keep them and use its default.
    """
    from huggingface_hub.errors import StrictDataclassError as Strict
    from transformers import AutoConfig

    from stages.model.gguf import GgufTensors, quick_gguf

    given, gguf = stage.config, files.gguf if files else None
    if given is not None:
        values = read_json(expanded(given)) if isinstance(given, str) else dict(given)
        kind = values.pop("model_type", None)
    elif files is not None and gguf:
        GgufTensors(files.folder / gguf).close()  # is it there as a whole?
    try:
        with compat.quiet(), quick_gguf() if gguf else contextlib.nullcontext():
            if given is None:
                assert files is not None
                config = AutoConfig.from_pretrained(
                    files.folder,
                    gguf_file=gguf,
                    trust_remote_code=stage.trust_remote_code,
                    local_files_only=True,
                )
                values = config.to_dict()
            elif not isinstance(given, str):
                default = AutoConfig.for_model(kind)
                known = {*default.to_dict(), *default.attribute_map, *OLD_SPELLINGS}
                for key in (key for key in values if key not in known):
                    near = difflib.get_close_matches(key, known, n=1)
                    hint = f"did you mean {near[0]}?" if near else ""
                    raise StageError(f"a {kind} config has no key {key!r}", hint=hint)
            if wrong := wrong_size(values):
                raise ValueError(wrong)
            if given is not None:
                return AutoConfig.for_model(kind, **values)
    except (OSError, ValueError, LookupError, TypeError, ImportError, Strict) as error:
        raise StageError(f"the model's config cannot be used: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise StageError(
            f"the weights in {files} are quantized and cannot be trained",
            hint="use the unquantized model",
        )
    return config


def open_tokenizer(files: Files, stage: HfSettings, log: Logger) -> Any:
    """Return the tokenizer of files, with the recipe's chat template. Raises StageError."""
    from transformers import AutoTokenizer

    from stages.model.gguf import quick_gguf

    try:
        with compat.quiet(), quick_gguf() if files.gguf else contextlib.nullcontext():
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


def known_templates() -> list[str]:
    """Return the names of the templates that come with this package."""
    return sorted(file.stem for file in _FOLDER.glob("*.jinja"))


def read_template(given: str) -> str:
    """Return the template of a local file or a known name. Raises StageError if there is none."""
    if not is_local(given):
        if given not in known_templates():
            hint = f"{did_you_mean(given, known_templates())}; a file starts with ./, ../, / or ~"
            raise StageError(f"no chat template is called {given!r}", hint=hint)
        return (_FOLDER / f"{given}.jinja").read_text("utf-8")
    from jinja2 import Environment, TemplateSyntaxError

    file = expanded(given)
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            raise StageError(f"{file} is not a file of at most {_LARGEST >> 20} MiB")
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise StageError(f"{file} cannot be read: {error}") from error
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(MARKERS.sub("", text))
    except TemplateSyntaxError as error:
        raise StageError(f"{file}:{error.lineno}: no chat template: {error.message}") from error
    except RecursionError as error:
        raise StageError(f"{file}: no chat template: nested too deep") from error
    return text


def unknown_tokens(template: str, tokenizer: Any) -> list[str]:
    """Return what looks like special tokens in a template, and is none of the tokenizer's."""
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    return sorted(set(_TOKEN.findall(template)) - known)


def turn_ends(tokenizer: Any) -> list[int]:
    """Return the special tokens with which an assistant's turn ends under the chat template: its
    own end, the same before a user's message if it has the same there; or else those with which a
    user's and a tool's message begin. Empty if there is no template, or no such token."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    from stages.template_limits import Limited, TemplateLimitError

    render = Limited(tokenizer.apply_chat_template, tokenizer.name_or_path)

    def after_answer(*roles: str) -> str:
        """The text after an answer that messages of some roles follow; empty if it is not found."""
        turns = (*_TURNS, *((role, ".") for role in roles))
        for in_parts in (False, True):
            contents = ([{"type": "text", "text": text}] if in_parts else text for _, text in turns)
            pairs = zip(turns, contents, strict=True)
            chat = [{"role": role, "content": content} for (role, _), content in pairs]
            try:
                text = str(render(chat, tokenize=False))
            except TemplateLimitError:
                raise
            except Exception:  # a template is a program, and may refuse this chat
                continue
            _, found, after = text.rpartition(_ANSWER)
            if found:
                return after
        return ""

    try:
        last, user, tool = after_answer(), after_answer("user"), after_answer("tool")
    except TemplateLimitError:
        return []
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = last, user, user.removeprefix(last), tool.removeprefix(last)
    end, both_ends, *begins = (
        list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts
    )
    own = [id_ for id_ in end if id_ in special]
    if own:
        pairs = zip(end, both_ends, strict=False)
        both = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        same = [id_ for id_, _ in both if id_ in special]
        return [*same[-1:], *own][:1]
    firsts = (ids[0] for ids in begins if ids)
    return [id_ for id_ in firsts if id_ in special and id_ != tokenizer.bos_token_id]


def wanted_ids(tokenizer: Any, rows: int) -> Mapping[str, list[int]]:
    """Return key of the configs -> ids that it must have, the tokenizer's own first."""
    found = {
        "eos_token_id": [tokenizer.eos_token_id, *turn_ends(tokenizer)],
        "bos_token_id": [tokenizer.bos_token_id],
        "pad_token_id": [tokenizer.pad_token_id],
    }
    return {
        key: list(dict.fromkeys(id_ for id_ in ids if id_ is not None and id_ < rows))
        for key, ids in found.items()
    }


def aligned(held: Any, wanted: list[int], *, several: bool) -> Any:
    """Return the value of a config that has all `wanted` ids, if it may have `several`, or else the
    first; ids that it held end a text too, so they stay."""
    before = held if isinstance(held, list) else [held]
    if not wanted or set(wanted if several else wanted[:1]) <= set(before):
        return held
    if not several:
        return wanted[0]
    ids = [*wanted, *(id_ for id_ in before if id_ is not None and id_ not in wanted)]
    return ids if len(ids) > 1 else ids[0]


def align(folder: Path, tokenizer: Any, rows: int) -> Iterator[str]:
    """Align both configs of a saved model with its tokenizer; yield what was changed, in words."""
    wanted = wanted_ids(tokenizer, rows)
    for name in ("config.json", "generation_config.json"):
        try:
            content = json.loads((folder / name).read_text("utf-8"))
        except ValueError as error:  # the source's own, which is copied
            yield f"{name} is left as it is, and not aligned: {error}"
            continue
        if not isinstance(content, dict):
            yield f"{name} is left as it is, and not aligned: it is not an object"
            continue
        # A model of text and more has the ids of its text in a part.
        text = content.get("text_config")
        part, changes = text if isinstance(text, dict) else content, []
        for key, ids in wanted.items():
            held = part.get(key)
            ends = key == "eos_token_id"
            several = ends and (name == "generation_config.json" or isinstance(held, list))
            value = aligned(held, ids, several=several)
            if value != held:
                part[key] = value
                changes.append(f"{key} {held} became {value}")
        if changes:
            content.pop("_from_model_config", None)  # it says more now than the model's config
            written = json.dumps(content, indent=2, ensure_ascii=False)
            (folder / name).write_text(f"{written}\n", encoding="utf-8")
            yield f"{name}: {', '.join(changes)}"
