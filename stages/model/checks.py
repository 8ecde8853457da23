"""What can be told about a `model.hf` slot before anything starts. No network, no heavy import."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contracts.stage import PlanView
from pipeline.errors import Problem
from pipeline.utils.text import did_you_mean
from stages.model.compat import causal_types
from stages.model.config_checks import wrong_size
from stages.model.files import COMMIT, HUB_ID, has_tokenizer, is_gguf, is_local, is_plain, local

if TYPE_CHECKING:
    from stages.model.hf import HfModel


def problems(stage: HfModel) -> Iterator[Problem]:
    """Every mistake in the slot."""
    yield from _exclusive(stage)
    if stage.config is not None:
        yield from _config(stage, stage.config)
    if stage.path is not None:
        yield from _path(stage, stage.path)
    if stage.tokenizer is not None:
        yield from _tokenizer(stage, stage.tokenizer)


def _exclusive(stage: HfModel) -> Iterator[Problem]:
    if stage.path is None and stage.config is None:
        yield Problem(
            message="the model is not given",
            key="path",
            hint="set `path` to a folder, a GGUF file or a hub id, or `config` to an architecture",
        )
    if stage.path is not None and stage.config is not None:
        yield Problem(message="`path` and `config` exclude each other", key="config")
    if stage.path is None:
        for key in ("revision", "gguf_file"):
            if getattr(stage, key) is not None:
                yield Problem(message=f"`{key}` needs `path`", key=key)
    if stage.path is None or stage.init == "random":
        for key in ("new_weights", "unused_weights"):
            if getattr(stage, key):
                yield Problem(message=f"`{key}` needs weights that are loaded", key=key)
    if stage.vocab_size is not None and stage.config is not None:
        yield Problem(message="`config` says it already", key="vocab_size")


def _config(stage: HfModel, config: Any) -> Iterator[Problem]:
    if isinstance(config, str):
        file = local(config)
        if not file.is_file():
            yield Problem(message=f"no such file: {file}", key="config")
            return
        read = _read_json(file)
        if read is None:
            yield Problem(message=f"{file} is not a JSON object", key="config")
            return
        config = read
    if not isinstance(config.get("model_type"), str):
        yield Problem(
            message="`model_type` is missing",
            key="config",
            hint="for example `model_type: llama`",
        )
    wrong = wrong_size(config)
    if wrong:
        yield Problem(message=wrong, key="config")
    elif "model_type" in config:
        yield from _architecture(stage, config, "config")


def _architecture(stage: HfModel, config: Mapping[str, Any], key: str) -> Iterator[Problem]:
    """Code that comes with a model can be of any architecture."""
    kind, known = config.get("model_type"), causal_types()
    own_code = stage.trust_remote_code and "auto_map" in config
    if not isinstance(kind, str) or not known or kind in known or own_code:
        return
    inner = config.get("text_config")
    hint = did_you_mean(kind, known)
    if isinstance(inner, Mapping) or "vision_config" in config:
        hint = "it is a model of text and more; only models of text alone are trained"
    yield Problem(
        message=f"transformers has no causal language model of type {kind!r}", key=key, hint=hint
    )


def _path(stage: HfModel, path: str) -> Iterator[Problem]:
    if not is_local(path):
        yield from _hub(stage, path)
        return
    if stage.revision is not None:
        yield Problem(
            message="`revision` is only for a hub id, and `path` is local", key="revision"
        )
    if is_gguf(path):
        yield from _gguf_path(stage, path)
        return
    folder = local(path)
    if not folder.is_dir():
        yield Problem(message=f"no such folder: {folder}", key="path")
    elif stage.gguf_file is not None:
        yield from _gguf_in(folder, stage.gguf_file)
    else:
        yield from _folder(stage, folder)


def _gguf_path(stage: HfModel, path: str) -> Iterator[Problem]:
    if stage.gguf_file is not None:
        yield Problem(message="`path` is already a GGUF file", key="gguf_file")
    if not local(path).is_file():
        yield Problem(message=f"no such file: {local(path)}", key="path")


def _gguf_in(folder: Path, name: str) -> Iterator[Problem]:
    if not is_plain(name):
        yield Problem(message="must be a file name inside `path`", key="gguf_file")
    elif not (folder / name).is_file():
        yield Problem(message=f"no such file: {folder / name}", key="gguf_file")


def _folder(stage: HfModel, folder: Path) -> Iterator[Problem]:
    file = folder / "config.json"
    if not file.is_file():
        gguf = sorted(folder.glob("*.gguf"))
        hint = f"set `gguf_file: {gguf[0].name}`" if gguf else "expected Hugging Face layout"
        yield Problem(message=f"no config.json in {folder}", key="path", hint=hint)
        return
    config = _read_json(file)
    if config is None:
        yield Problem(message=f"{file} is not a JSON object", key="path")
    elif "quantization_config" in config:
        yield Problem(
            message=f"the weights in {folder} are quantized and cannot be trained",
            key="path",
            hint="use the unquantized model",
        )
    elif wrong_size(config):
        yield Problem(message=f"{file}: {wrong_size(config)}", key="path")
    else:
        yield from _architecture(stage, config, "path")


def _hub(stage: HfModel, path: str) -> Iterator[Problem]:
    if not HUB_ID.fullmatch(path):
        yield Problem(
            message=f"{path!r} is neither a hub id (owner/name) nor a local path",
            key="path",
            hint="a local path starts with /, ./, ../ or ~",
        )
        return
    if stage.gguf_file is not None and not is_plain(stage.gguf_file):
        yield Problem(message="must be a file name inside `path`", key="gguf_file")
    if stage.allow_floating_revision:
        return
    if stage.revision is None:
        yield Problem(
            message=f"the hub model {path} needs `revision`, the commit to use",
            key="path",
            hint="set `revision` to 40 hexadecimal digits, or `allow_floating_revision: true`; "
            "a local path starts with /, ./, ../ or ~",
        )
    elif not COMMIT.fullmatch(stage.revision):
        yield Problem(
            message=f"{stage.revision!r} is not a commit (40 hexadecimal digits)",
            key="revision",
            hint="give the commit, or set `allow_floating_revision: true`",
        )


def _tokenizer(stage: HfModel, path: str) -> Iterator[Problem]:
    if not is_local(path):
        if not HUB_ID.fullmatch(path):
            yield Problem(message=f"{path!r} is neither a hub id nor a local path", key="tokenizer")
        elif not stage.allow_floating_revision:
            yield Problem(
                message=f"the hub tokenizer {path} is not pinned to a commit",
                key="tokenizer",
                hint="give a local folder, or set `allow_floating_revision: true`",
            )
    elif is_gguf(path):
        if not local(path).is_file():
            yield Problem(message=f"no such file: {local(path)}", key="tokenizer")
    elif not has_tokenizer(local(path)):
        yield Problem(message=f"no tokenizer files in {local(path)}", key="tokenizer")


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


FLASH = "flash_attention_"


def speed_problems(stage: HfModel, plan: PlanView) -> Iterator[Problem]:
    """Mistakes in the fields about attention, kernels and fp8."""
    yield from _attention(stage.attention, plan)
    again = stage.activation_checkpointing
    if again is not None and again.keep == "attention" and stage.attention == "eager":
        yield Problem(
            key="activation_checkpointing.keep",
            message="eager attention is no single operation whose result could be kept",
            hint="set attention: sdpa, or keep: matmuls",
        )
    if again is not None and again.offload and stage.compile is not None:
        yield Problem(
            key="compile",
            message="torch compiles no block whose activations are offloaded",
            hint="leave it out, or set activation_checkpointing.offload: false",
        )
    if stage.kernels is not None:
        yield from _needs(plan, "kernels", "Liger", "liger_kernel", "liger-kernel")
    if stage.fp8 is not None:
        yield from _fp8(stage, plan)


def _attention(name: str, plan: PlanView) -> Iterator[Problem]:
    if name.startswith(FLASH) or "/" in name:
        package = "kernels" if "/" in name or not _installed("flash_attn") else "flash_attn"
        yield from _needs(plan, "attention", name, package, package)
    elif name == "flex_attention" and plan.device == "cpu":
        yield Problem(
            key="attention",
            message="flex_attention computes no gradients on a CPU",
            hint="use sdpa",
        )


def _fp8(stage: HfModel, plan: PlanView) -> Iterator[Problem]:
    assert stage.fp8 is not None
    if not _installed("torchao"):
        yield Problem(key="fp8", message="needs torchao", hint="pip install 'pipetrain[torchao]'")
    if stage.fp8.emulate:
        return
    if plan.device == "cpu":
        yield Problem(
            key="fp8",
            message="needs a GPU with 8-bit products (compute capability 8.9 or above)",
            hint="set fp8.emulate: true to try it, slowly",
        )
    if stage.compile is None:
        yield Problem(
            key="fp8",
            message="is slower than bf16 without compile, as every cast is a pass of its own",
            hint="set compile: {}",
        )


def _needs(plan: PlanView, key: str, what: str, module: str, package: str) -> Iterator[Problem]:
    if plan.device == "cpu":
        yield Problem(key=key, message=f"{what} needs a GPU")
    elif not _installed(module):
        yield Problem(key=key, message=f"{what} needs {package}", hint=f"pip install {package}")


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
