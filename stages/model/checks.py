"""Mistakes in a `model.hf` slot that show before anything starts. No network, no heavy import."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline import PlanView, Problem, StageError, UsageError, traits
from pipeline.utils import (
    COMMIT,
    did_you_mean,
    expanded,
    near_path,
    pins_asked,
    require_code_trust,
    require_trust,
    shown_path,
)
from stages.fields import instead_of_variable
from stages.model.assets import read_template
from stages.model.compat import attentions, causal_types, is_multimodal, suited_attention
from stages.model.config_checks import (
    NOT_BY_TEXT,
    other_angles,
    sees_later_tokens,
    uneven_heads,
    wrong_size,
)
from stages.model.files import (
    HUB_ID,
    REVISION,
    has_tokenizer,
    is_gguf,
    is_local,
    is_plain,
    kernels_named,
    not_read,
    read_json,
    safetensors_files,
)
from stages.model.settings import HfSettings

Found = Iterator[tuple[str, str, str]]
"""Key, message and hint of problems."""


def problems(stage: HfSettings) -> Iterator[Problem]:
    """Yield every mistake in the fields about files, config and tokenizer."""
    for key, message, hint in (*_exclusive(stage), *_model(stage), *_words(stage)):
        yield Problem(key=key, message=message, hint=hint)


def _exclusive(stage: HfSettings) -> Found:
    """Fields that need or exclude each other, or that run code that is not trusted."""
    if stage.path is None and stage.config is None:
        hint = "set `path` to a folder, a GGUF file or a hub id, or `config` to an architecture"
        yield "path", "the model is not given", hint
    if stage.path is not None and stage.config is not None:
        hint = "set one of them to null, such as config: null"
        yield "path", "`path` and `config` exclude each other", hint
    for key in ("revision", "gguf_file") if stage.path is None else ():
        if getattr(stage, key) is not None:
            yield key, f"`{key}` needs `path`", ""
    loads = stage.path is not None and stage.init != "random"
    for key in () if loads else ("new_weights", "unused_weights"):
        if getattr(stage, key):
            yield key, f"`{key}` needs weights that are loaded", ""
    if stage.vocab_size is not None and stage.config is not None:
        yield "vocab_size", "`config` sets it already", ""
    for key, origin in foreign_code(stage):
        yield from _untrusted(key, require_code_trust, origin)


def foreign_code(stage: HfSettings) -> Iterator[tuple[str, str]]:
    """Yield the fields that make code run which is not installed, and its origin."""
    if stage.trust_remote_code:
        yield "trust_remote_code", f"{stage.path or 'the model'} itself"
    if "/" in stage.attention:
        yield "attention", f"the hub's kernel {stage.attention}"


def _untrusted(key: str, require: Callable[..., object], what: str | Path) -> Found:
    try:
        require(what)
    except UsageError as error:
        yield key, str(error), ""


def _unpinned(key: str, kernel: str) -> Found:
    """A kernel of the hub without a commit, if commits are asked for."""
    name, commit = (part.partition(":")[0] for part in kernel.partition("@")[::2])
    if pins_asked() and not COMMIT.fullmatch(commit):
        yield key, f"the hub's kernel {name} names no commit", f"write {name}@COMMIT"


def _model(stage: HfSettings) -> Found:
    if isinstance(stage.config, str):
        yield from _config_file(stage, expanded(stage.config), "config")
    elif stage.config is not None:
        yield from _config(stage, stage.config, "config")
    path, name = stage.path, stage.gguf_file
    if name is not None and not is_plain(name):
        yield "gguf_file", "must be a file name inside `path`", ""
    elif path is not None and is_local(path):
        if stage.revision is not None:
            yield "revision", "`revision` is only for a hub id, and `path` is local", ""
        place = expanded(path)
        if is_gguf(path) and name is not None:
            yield "gguf_file", "`path` is already a GGUF file", ""
        if not is_gguf(path):
            yield from _folder(stage, place)
        elif not place.is_file():
            yield "path", f"no such file: {place}", near_path(place)
    elif path is not None and not HUB_ID.fullmatch(path):
        repo, mark, revision = path.partition("@")
        split = f"write `path: {repo}` and `revision: {revision}`"
        hint = split if mark and HUB_ID.fullmatch(repo) else _as_local(path)
        yield "path", f"{path!r} is neither a hub id (owner/name) nor a local path", hint
    elif path is not None and not REVISION.fullmatch(stage.revision or "main"):
        yield "revision", f"{stage.revision!r} is not a commit, branch or tag", ""


def _as_local(path: str) -> str:
    """The hint for a path that is not marked as a local one."""
    marked = f"write ./{path}" if Path(path).exists() else ""
    return instead_of_variable(path) or marked or "a local path starts with /, ./, ../ or ~"


def _folder(stage: HfSettings, place: Path) -> Found:
    name = stage.gguf_file
    if place.is_file():
        weights = place.suffix in (".json", ".safetensors", ".bin")
        hint = f"name its folder: {shown_path(place.parent)}" if weights else ""
        yield "path", f"{place} is a file, and no GGUF file", hint
    elif not place.is_dir():
        yield "path", f"no such folder: {place}", near_path(place)
    elif name is not None:
        if not (place / name).is_file():
            yield "gguf_file", f"no such file: {place / name}", ""
    elif (place / "config.json").is_file():
        yield from _config_file(stage, place / "config.json", "path")
        pickles = sorted(place.glob("pytorch_model*.bin")) if stage.init != "random" else []
        if pickles and not safetensors_files(place):  # its weights can only be read from them
            yield from _untrusted("path", require_trust, pickles[0])
    else:
        gguf, inner = sorted(place.glob("*.gguf")), sorted(place.glob("*/config.json"))
        run = "it is a run; " if (place / "recipe.yaml").is_file() else ""
        hint = "expected Hugging Face layout"
        if gguf:
            hint = f"set `gguf_file: {gguf[0].name}`"
        elif inner:
            hint = f"{run}{'its model is' if run else 'there is'} {shown_path(inner[0].parent)}"
        elif run:
            hint = f"{run}`pipe export {shown_path(place)} --out FOLDER` writes its model"
        yield "path", f"no config.json in {place}", hint


def _config_file(stage: HfSettings, file: Path, key: str) -> Found:
    if not file.is_file():
        yield key, f"no such file: {file}", ""
        return
    try:
        config = read_json(file)
    except StageError as error:
        yield key, str(error), ""
        return
    if key == "path" and "quantization_config" in config:
        message = f"the weights in {file.parent} are quantized and cannot be trained"
        yield key, message, "use the unquantized model"
    else:
        yield from _config(stage, config, key)


def _config(stage: HfSettings, config: Mapping[str, Any], key: str) -> Found:
    for kernel in kernels_named(config):
        yield from _untrusted(key, require_code_trust, f"the hub's kernel {kernel}")
        yield from _unpinned(key, kernel)
    kind, known = config.get("model_type"), causal_types()
    foreign = stage.trust_remote_code and "auto_map" in config
    if wrong := wrong_size(config):
        yield key, wrong, ""
    elif not foreign and not isinstance(kind, str):
        yield key, "`model_type` is missing", "for example `model_type: llama`"
    elif not foreign and is_multimodal(config):
        yield from _multimodal(stage, str(kind), key)
    elif not foreign and known and kind not in known:
        message = f"transformers has no causal language model of type {kind!r}"
        yield key, message, did_you_mean(str(kind), known)
    elif not foreign and (uneven := uneven_heads(config)):
        yield key, uneven, ""
    else:  # code that comes with a model can be of any architecture
        later = None if foreign else sees_later_tokens(config)
        for unsuited in (later, other_angles(config, of_transformers=not foreign)):
            if unsuited:
                yield key, *unsuited


def _multimodal(stage: HfSettings, kind: str, key: str) -> Found:
    """A model of more than text that cannot be trained on text, or not as declared."""
    why = NOT_BY_TEXT.get(kind)
    if why:
        yield key, f"a {kind} is a model of more than text, and {why}", "train a language model"
    elif stage.path is None or stage.init == "random":
        message = f"a {kind} is a model of more than text, and an export needs weights of the rest"
        yield key, message, "start from its pretrained weights, or declare a language model"


def _words(stage: HfSettings) -> Found:
    """Mistakes about the tokenizer and its chat template."""
    path, revision = stage.tokenizer, stage.tokenizer_revision
    if path is None:
        if revision is not None:
            message = "needs `tokenizer`; the tokenizer in `path` has its `revision`"
            yield "tokenizer_revision", message, ""
    elif not is_local(path):
        if not HUB_ID.fullmatch(path):
            yield "tokenizer", f"{path!r} is neither a hub id nor a local path", _as_local(path)
        elif not REVISION.fullmatch(revision or "main"):
            yield "tokenizer_revision", f"{revision!r} is not a commit, branch or tag", ""
    elif revision is not None:
        yield "tokenizer_revision", "is only for a hub id, and `tokenizer` is local", ""
    else:
        place = expanded(path)
        if is_gguf(path) and not place.is_file():
            yield "tokenizer", f"no such file: {place}", ""
        elif not is_gguf(path) and not has_tokenizer(place):
            yield "tokenizer", f"no tokenizer files in {place}", ""
    if stage.chat_template is not None:
        try:
            read_template(stage.chat_template)
        except StageError as error:
            yield "chat_template", str(error), ""


def not_read_problems(stage: HfSettings, plan: PlanView) -> Iterator[Problem]:
    """Yield the files next to the weights of a local folder that matter: a mistake for an adapter,
    which transformers would apply, unless an adapter slot starts from it; a warning for a file that
    is not read."""
    if stage.path is None or not is_local(stage.path) or is_gguf(stage.path):
        return
    if stage.init == "random" or stage.gguf_file is not None:
        return
    folder = expanded(stage.path)
    adapter, others = not_read(folder)
    readers = plan.readers(stage) if adapter else ()
    named = (one.start_from for one in readers if isinstance(one, traits.StartsFrom))
    started = (expanded(name).resolve() for name in named if name)
    if adapter and folder.resolve() not in started:
        hint = f"name it in an adapter slot (`start_from: {stage.path}`), or move it away"
        yield Problem(key="path", message=adapter, hint=hint)
    if others:
        yield Problem(key="path", message=others, hint="remove the one that is stale", warning=True)


def multimodal_notes(stage: HfSettings) -> Iterator[Problem]:
    """Warn of a model of more than text: only its language model is trained."""
    config = stage.config_at_hand() or {}
    foreign = stage.trust_remote_code and "auto_map" in config
    kind = str(config.get("model_type"))
    if is_multimodal(config) and not foreign and not list(_multimodal(stage, kind, "")):
        yield Problem(
            message=f"a {kind} is a model of more than text: its language model is "
            "trained, all else stays in its files and is passed through to the export",
            warning=True,
        )


def speed_problems(stage: HfSettings, plan: PlanView) -> Iterator[Problem]:
    """Yield every mistake in the fields about attention, memory and speed."""
    for key, message, hint in _speed(stage, plan):
        yield Problem(key=key, message=message, hint=hint)


def _speed(stage: HfSettings, plan: PlanView) -> Found:
    name = stage.attention
    if name.startswith("flash_attention_") or "/" in name:
        package = "kernels" if "/" in name or not find_spec("flash_attn") else "flash_attn"
        yield from _needs(plan, "attention", name, package, package)
        if "/" in name:
            yield from _unpinned("attention", name)
        elif package == "kernels" and pins_asked():
            message = f"{name} without the package flash_attn is the hub's, at no commit"
            yield "attention", message, "install flash_attn, or set attention: sdpa"
    elif name == "flex_attention" and plan.device == "cpu":
        yield "attention", "flex_attention computes no gradients on a CPU", "use sdpa"
    elif name == "sdpa" and not stage.trust_remote_code:
        kind = str((stage.config_at_hand() or {}).get("model_type"))
        if "sdpa" not in (attentions(kind) or "sdpa"):
            best = suited_attention(kind, plan.device)
            yield "attention", f"transformers has no sdpa for a {kind}", f"set attention: {best}"
    if stage.kernels is not None:
        yield from _needs(plan, "kernels", "Liger", "liger_kernel", "liger-kernel")
    recomputed = stage.activation_checkpointing
    if recomputed and recomputed.keep == "attention" and stage.attention == "eager":
        message = "eager attention is not one operation whose result can be kept"
        yield "activation_checkpointing.keep", message, "set attention: sdpa, or keep: matmuls"
    if recomputed and recomputed.offload and stage.compile is not None:
        message = "torch compiles no block whose activations are offloaded"
        yield "compile", message, "leave out compile, or activation_checkpointing.offload"
    if stage.fp8 and not find_spec("torchao"):
        yield "fp8", "needs torchao", "pip install 'pipetrain[torchao]'"
    if stage.fp8 and plan.device == "cpu" and not stage.fp8.emulate:
        message = "needs a GPU with 8-bit products (compute capability 8.9 or above)"
        yield "fp8", message, "set fp8.emulate: true to try it, slowly"


def _needs(plan: PlanView, key: str, what: str, module: str, package: str) -> Found:
    if plan.device == "cpu":
        yield key, f"{what} needs a GPU", ""
    elif not plan.forecast and not find_spec(module):  # a plan is for other machines
        yield key, f"{what} needs {package}", f"pip install {package}"
