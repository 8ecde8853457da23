"""The transformers config of a model: from its files, or spelled out in the recipe."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import StageError
from stages.model import compat
from stages.model.paths import Files, local
from stages.model.sizes import wrong_size

OLD_SPELLINGS = (
    "head_dim", "rope_theta", "rope_scaling", "torch_dtype", "partial_rotary_factor",
    "rope_local_base_freq", "sliding_window_pattern", "rotary_pct", "rotary_emb_base",
)  # fmt: skip
"""Keys that architectures read without declaring them, or translate."""


def config_of_recipe(config: Mapping[str, Any] | str) -> Any:
    """From a mapping, or the path of a config.json. Raises StageError when it is unusable.

    Keys of a mapping that the architecture does not know are refused; transformers would keep them
    and go on with its default.
    """
    from transformers import AutoConfig

    spelled_out = not isinstance(config, str)
    values = dict(
        json.loads(local(config).read_text("utf-8")) if isinstance(config, str) else config
    )
    kind = values.pop("model_type", None)
    with _unusable():
        if spelled_out:
            _refuse_unknown(kind, values, AutoConfig.for_model(kind))
        _require_sizes(values)
        return AutoConfig.for_model(kind, **values)


def config_of_files(files: Files, *, trust_remote_code: bool) -> Any:
    """From a folder or GGUF file. Raises StageError if unusable or if the weights are quantized."""
    from transformers import AutoConfig

    with _unusable():
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
    from huggingface_hub.errors import StrictDataclassError

    try:
        with compat.quiet():
            yield
    except (OSError, ValueError, TypeError, KeyError, ImportError, StrictDataclassError) as error:
        raise StageError(f"the model's config cannot be used: {error}") from error


def _require_sizes(config: Mapping[str, Any]) -> None:
    wrong = wrong_size(config)
    if wrong:
        raise StageError(f"the model's config cannot be used: {wrong}")


def _refuse_unknown(kind: str, values: Mapping[str, Any], default: Any) -> None:
    known = {*default.to_dict(), *default.attribute_map, *OLD_SPELLINGS}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else ""
            raise StageError(f"a {kind} config has no key {key!r}", hint=hint)
