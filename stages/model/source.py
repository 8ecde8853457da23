"""A causal language model of transformers as a model source."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from pipeline.contracts.model import ModelSource
from pipeline.contracts.precision import DtypeName, torch_dtype
from pipeline.contracts.tensors import TensorReader
from pipeline.errors import StageError
from stages.data.sources import file_digests
from stages.model import assets, compat
from stages.model.block_changes import checkpoint_blocks, compile_blocks, use_fp8, use_liger
from stages.model.declared import outline, ties
from stages.model.files import (
    COMMIT,
    Files,
    has_tokenizer,
    is_local,
    safetensors_files,
    source_fingerprint,
    weight_files,
)
from stages.model.gguf import open_gguf
from stages.model.random_reader import RandomReader
from stages.model.reconcile import Allowed, fit
from stages.weights.converted import ConvertedReader
from stages.weights.safetensors import SafetensorsReader
from stages.weights.torch_files import TorchFilesReader

if TYPE_CHECKING:
    from logging import Logger

    from torch import Tensor

    from stages.model.hf import ActivationCheckpointing, Compile, Fp8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Changes of the module for the sake of training alone."""

    checkpointing: ActivationCheckpointing | None = None
    compile: Compile | None = None
    fp8: Fp8 | None = None
    kernels: str | None = None

    def prepare(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Change a module and its blocks in place. Raises StageError when blocks are asked for that
        there are not."""
        if not blocks and (self.checkpointing is not None or self.compile is not None):
            raise StageError(
                f"{type(model).__name__}'s blocks cannot be told, so none can be computed again or "
                "compiled",
                hint="leave out activation_checkpointing and compile",
            )
        if self.kernels is not None:
            use_liger(model)
        if self.fp8 is not None:
            use_fp8(model, self.fp8)
        if self.checkpointing is not None:
            checkpoint_blocks(blocks, self.checkpointing)
        if self.compile is not None:
            compile_blocks(blocks, self.compile)


class HfSource(ModelSource):
    """Declared by `model.hf`. Either `files` has the weights, or they are `random`; what is
    `allowed` to be new, and new rows of a `resized` vocabulary, are drawn from the seed."""

    def __init__(
        self,
        *,
        name: str,
        config: Any,
        files: Files | None,
        tokenizer_files: Files | None,
        seed: int,
        random: bool,
        allowed: Allowed,
        resized: bool,
        attention: str,
        training: Training,
        trust_remote_code: bool,
        log: Logger,
    ) -> None:
        self.name = name
        self.config = config
        self._files = files
        self._tokenizer_files = tokenizer_files
        self._seed = seed
        self._random = random
        self._declared = allowed
        self._resized = resized
        self._attention = attention
        self._training = training
        self._trust_remote_code = trust_remote_code
        self._log = log

    def build(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(self.config)
        # Training never reads a key-value cache; `self.config` keeps the value to be exported.
        config.use_cache = False
        try:
            config.get_text_config().use_cache = False
            with compat.quiet(), compat.without_init():
                model = AutoModelForCausalLM.from_config(
                    config,
                    dtype=torch.float32,
                    attn_implementation=self._attention,
                    trust_remote_code=self._trust_remote_code,
                )
        except Exception as error:  # whatever transformers makes of an odd config
            kind = "" if isinstance(error, ValueError | ImportError) else type(error).__name__
            reason = f"{kind}{': ' * bool(kind)}{error}"
            raise StageError(f"{self.name} cannot be built: {reason}") from error
        model.tie_weights()
        self._training.prepare(model, self.blocks(model))
        return cast("nn.Module", model)

    @property
    def inference_view(self) -> ModelSource:
        if self._training == Training():
            return self
        same = copy.copy(self)
        same._training = Training()
        return same

    @functools.cached_property
    def _outline(self) -> nn.Module:
        """The module with parameters on the meta device (no memory), real buffers, weights tied."""
        return outline(self.inference_view)

    @functools.cached_property
    def _allowed(self) -> Allowed:
        tables = compat.vocabulary(self._outline) if self._resized else ()
        return dataclasses.replace(self._declared, vocabulary=tables)

    @functools.cached_property
    def _ties(self) -> Mapping[str, str]:
        return ties(self._outline)

    def weights(self) -> TensorReader:
        if self._random:
            return self._initialised()
        assert self._files is not None
        held = self._stored()
        try:
            return fit(
                str(self._files), held, self._outline, self._ties, self._allowed,
                self._initialised, self._log,
            )  # fmt: skip
        except BaseException:
            held.close()
            raise

    def _initialised(self) -> TensorReader:
        model = self._outline
        return RandomReader(model, self.blocks(model), self._ties, seed=self._seed)

    def _stored(self) -> TensorReader:
        """Tensors of the files, under the names of the module as far as they are known."""
        assert self._files is not None
        folder, gguf = self._files.folder, self._files.gguf
        files = weight_files(folder, gguf)
        if gguf is not None:
            return open_gguf(files[0], self._outline)
        base = SafetensorsReader(files) if safetensors_files(folder) else TorchFilesReader(files)
        return ConvertedReader(base, compat.changes_on_load(self._outline, base.names()))

    def tie(self, model: nn.Module) -> None:
        model.tie_weights()  # type: ignore[operator]

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        classes = compat.block_classes(model)
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        return [block for blocks in lists for block in blocks if type(block).__name__ in classes]

    def compiled_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        return () if self._training.compile is None else self.blocks(model)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        files = self._tokenizer_files
        if files is None or not (files.gguf or has_tokenizer(files.folder)):
            raise StageError(
                f"{self.name} comes without a tokenizer",
                hint="set `tokenizer` in the model's slot to a folder that has one",
            )
        try:
            with compat.quiet():
                return AutoTokenizer.from_pretrained(
                    files.folder,
                    gguf_file=files.gguf,
                    trust_remote_code=self._trust_remote_code,
                    local_files_only=True,
                )
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise StageError(f"the tokenizer in {files} cannot be loaded: {error}") from error

    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        table: Tensor = self._outline.get_input_embeddings().weight  # type: ignore[operator]
        return int(table.shape[0])

    @functools.cached_property
    def _fingerprint(self) -> str:
        files: Sequence[Path] = ()
        if not self._random:
            assert self._files is not None
            files = weight_files(self._files.folder, self._files.gguf)
        drawn = self._random or self._resized or bool(self._declared.new)
        return source_fingerprint(
            self.config, files, seed=self._seed if drawn else None, new=self._declared.new
        )

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @functools.cached_property
    def _contents(self) -> str | None:
        if self._random:
            return None
        assert self._files is not None
        files = weight_files(self._files.folder, self._files.gguf)
        return hashlib.sha256("\n".join(file_digests(files)).encode()).hexdigest()

    @property
    def contents(self) -> str | None:
        return self._contents

    @property
    def location(self) -> str | None:
        changed = self._random or self._resized or bool(self._declared.new)
        if changed or self._files is None or self._files.gguf:
            return None
        return self.name if not is_local(self.name) else str(self._files)

    @property
    def revision(self) -> str | None:
        if self.location is None or is_local(self.name) or self._files is None:
            return None
        commit = self._files.folder.name  # of the hub's cache
        return commit if COMMIT.fullmatch(commit) else None

    def save_assets(self, folder: Path, *, dtype: str) -> None:
        model = self._outline
        torch_name = str(torch_dtype(cast("DtypeName", dtype))).removeprefix("torch.")
        origin = self._files.folder if self._files else None
        with compat.quiet():
            assets.save_config(
                self.config, folder, architecture=type(model).__name__, dtype=torch_name
            )
            assets.save_generation_config(self.config, origin, folder)
            if self._tokenizer_files is not None and (
                self._tokenizer_files.gguf or has_tokenizer(self._tokenizer_files.folder)
            ):
                assets.save_tokenizer(self.tokenizer(), folder)
        if compat.is_remote_code(model):
            assets.copy_code(origin, folder)
