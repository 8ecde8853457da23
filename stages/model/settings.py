"""Fields of `model.hf`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Gt

from pipeline import StageError

Fate = Literal["pass_through", "drop"]
"""The treatment of a tensor that is not read."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Drop activations of transformer blocks in forward and compute them again in backward (Chen et
    al. 2016, Training Deep Nets with Sublinear Memory Cost)."""

    every: Annotated[int, Gt(0)] = 1
    """Every n-th block is computed again, from the first on; 1 means all."""
    keep: Literal["nothing", "attention", "matmuls"] = "nothing"
    """Results that are kept because they cost most to compute: attention's, or attention's and all
    matrix products."""
    offload: bool = False
    """Keep the inputs of these blocks in host memory until backward needs them."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compile each transformer block with torch.compile."""

    backend: str = "inductor"
    """Backend of torch.compile."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        "default"
    )
    """Effort that torch spends on finding faster kernels."""
    dynamic: bool | None = None
    """Whether shapes change: null finds out, false compiles again for each length, true for all
    lengths at once."""


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Multiply in 8 bits where that is faster: linear layers but the head, by torchao (Micikevicius
    et al. 2022, FP8 Formats for Deep Learning). Weights, gradients and everything else keep the
    precision slot's dtypes."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Granularity of scales: per tensor, which is fastest, or per row, which is more precise;
    `rowwise_with_gw_hp` computes gradients of weights in the compute dtype."""
    emulate: bool = False
    """Round to 8 bits but multiply in the compute dtype: slow, to try it without such a GPU."""


@dataclass(frozen=True, kw_only=True)
class HfSettings:
    """Fields of a model slot; `HfModel` says what they mean together."""

    path: str | None = None
    """A local folder in Hugging Face layout (starting with `/`, `./`, `../` or `~`), a GGUF file
    (ending in `.gguf`), or a model id of the Hugging Face hub."""
    revision: str | None = None
    """Commit (40 hexadecimal digits), branch or tag of a hub model; the main branch by default. A
    run asks for the commit once, says it, and keeps it in its recipe; `pipe pin` writes it into
    yours, and `--pinned` requires it."""
    gguf_file: str | None = None
    """Name of a GGUF file in the folder or hub repository `path`. Its weights are dequantized."""
    config: Mapping[str, Any] | str | None = None
    """Architecture of a model with random weights: the content of a `config.json`
    (`{model_type: llama, hidden_size: 64, ...}`) or the path of one."""
    tokenizer: str | None = None
    """Folder, GGUF file or hub id of the tokenizer, if not in `path`."""
    tokenizer_revision: str | None = None
    """The same as `revision`, for a hub id in `tokenizer`."""
    chat_template: str | None = None
    """Chat template, if not the tokenizer's own: a file (starting with `/`, `./`, `../` or `~`), or
    `chatml`, `gemma`, `llama3`, or `plain`, which needs no special tokens. It is exported with the
    tokenizer. For base models, which have none."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` takes only the architecture from `path` and initialises the weights from the run's
    seed. With `config` the weights are always random."""
    vocab_size: Annotated[int, Gt(0)] | None = None
    """Rows of the embedding and of the head, if not as in `path`: additional rows are
    initialised as the architecture does, from the run's seed; surplus ones are cut off."""
    new_weights: tuple[str, ...] = ()
    """Patterns (`lm_head.*`) of tensors to be initialised from the run's seed instead of loaded: a
    head that `path` lacks, or has for another purpose."""
    unused_weights: Mapping[str, Fate] = field(default_factory=dict)
    """Tensors in `path` that this model does not read, by patterns (`mtp.*: pass_through`), and
    their treatment: `pass_through` to the export, byte for byte, or `drop`. Others that are
    not read are an error, except for the parts of a model of more than text that text does not use,
    which are passed through."""
    frozen: tuple[str, ...] = ()
    """Patterns (`model.embed_tokens.*`) of parameters that are not trained. They are held in the
    compute dtype; checkpoints leave them out, and an export has them as in `path`. A pattern that
    matches one name of a shared tensor freezes it."""
    attention: str = "sdpa"
    """Attention implementation of transformers: `sdpa`, `eager`, `flex_attention`,
    `flash_attention_2` (or 3, 4), or a kernel of the hub (`kernels-community/flash-attn2`),
    which needs `--trust-remote-code` on the command line, and with `--pinned` its commit:
    `OWNER/NAME@COMMIT`."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """Drop activations in forward and compute them again in backward; null keeps them."""
    compile: Compile | None = None
    """Compile the transformer blocks with torch.compile, and the train slot's loss in chunks; null
    does not."""
    fp8: Fp8 | None = None
    """Multiply in 8 bits, on GPUs that have it; null does not. Only faster with `compile`."""
    kernels: Literal["liger"] | None = None
    """Fused Triton kernels for normalisation, rotary embedding and gated activations: Liger Kernel
    (Hsu et al. 2024). Its fused loss is `loss_chunk_size` in the train slot."""
    trust_remote_code: bool = False
    """Run model code that the folder or hub repository brings along. A recipe cannot allow that by
    itself: `--trust-remote-code` on the command line does."""

    def config_at_hand(self) -> Mapping[str, Any] | None:
        """Return the config, if it can be read without a network."""
        from stages.model.files import is_local, known_config, read_config

        path = self.path
        if path is None and self.config is None:
            return None
        if path is not None and not is_local(path) and known_config(path) is None:
            return None
        try:
            return read_config(self)
        except StageError:
            return None
