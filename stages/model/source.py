"""A causal language model of transformers as a model source."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from pipeline import DtypeName, ModelSource, Scorer, StageError, TensorReader, Weights, torch_dtype
from pipeline.utils import COMMIT, open_regular
from stages.digests import file_digests
from stages.model import assets, compat
from stages.model.block_changes import CHANGES, change_blocks, leave_out_towers
from stages.model.config_checks import table_of_positions
from stages.model.declared import completed, matches, outline, refuse_idle, ties, without_memory
from stages.model.files import (
    ADAPTER,
    Files,
    find_files,
    has_tokenizer,
    is_local,
    not_read,
    safetensors_files,
    weight_files,
)
from stages.model.gguf import open_gguf
from stages.model.reconcile import Allowed, RandomReader, fit, sized, sort_out
from stages.model.rotary_compat import choose_by_document
from stages.model.settings import HfSettings
from stages.weights.converted import ConvertedReader, renamed
from stages.weights.files import SafetensorsReader, TorchFilesReader, sampled

if TYPE_CHECKING:
    from pipeline import Context

EDGE = 1 << 20
"""Bytes at each end of a file that count for a fingerprint."""
UNSTABLE = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "_model_name_or_path")


def open_source(stage: HfSettings, ctx: Context) -> HfSource:
    """Return the model that a slot declares. Raises StageError for files or a config that cannot be
    used.

    Rank 0 goes first, so that the others find the files that it has downloaded.
    """
    from transformers import PreTrainedModel  # noqa: F401 - Python collects rarely up to here

    files = None
    with ctx.dist.rank0_first():
        if stage.path is not None:
            loads = stage.init == "pretrained"
            files = find_files(stage.path, stage.revision, stage.gguf_file, weights=loads)
        words = files
        if stage.tokenizer is not None:
            words = find_files(stage.tokenizer, stage.tokenizer_revision)
    if files is not None and not is_local(stage.path or ""):  # others are looked at in `check`
        weights = stage.init != "random" and stage.gguf_file is None
        adapter, others = not_read(files.folder) if weights else ("", "")
        if adapter:
            raise StageError(
                f"{stage.path}: {adapter}",
                hint="download it and name the folder in `path` and in an adapter slot "
                f"(`start_from`), or only in `path` and without {ADAPTER}",
            )
        if others:
            ctx.log.warning("%s: %s", stage.path, others)
    config = assets.open_config(stage, files)
    if stage.vocab_size is not None:
        config.get_text_config().vocab_size = stage.vocab_size
    return HfSource(stage, config, files, words, ctx)


class HfSource(ModelSource):
    """The model of a `model.hf` slot. Its weights are read from `files`, or random; declared new
    weights, and new rows of a resized vocabulary, are drawn from the seed."""

    def __init__(
        self, stage: HfSettings, config: Any, files: Files | None, words: Files | None, ctx: Context
    ) -> None:
        self.name = stage.path or "random initialisation"
        self.config = config
        self._stage, self._seed, self._log = stage, ctx.seed, ctx.log
        self._files, self._tokenizer_files = files, words
        self._random = stage.config is not None or stage.init == "random"
        self._resized = stage.vocab_size is not None
        values = config.to_dict()
        foreign = stage.trust_remote_code and "auto_map" in values
        self._multimodal = not foreign and compat.is_multimodal(values)
        """Whether it is a model of more than text, whose other parts are left out."""
        self._has_tokenizer = words is not None and bool(words.gguf or has_tokenizer(words.folder))
        self._tokenizer: Any = None
        self._processor: Any = None
        self._said: set[str] = set()
        """Messages that this source, or a view of it, has logged."""

    # The module.

    def build(self) -> nn.Module:
        model = self._built()
        if self._multimodal:
            leave_out_towers(model)
        choose_by_document(model)
        change_blocks(self._stage, model, self.blocks(model))
        for name in self.frozen_base:
            model.get_parameter(name).requires_grad_(False)
        return model

    def _built(self) -> nn.Module:
        """The architecture with all of its parts."""
        import transformers
        from transformers.initialization import no_init_weights

        config = copy.deepcopy(self.config)
        # Training never reads a key-value cache; `self.config` keeps the value to be exported.
        config.use_cache = False
        try:
            config.get_text_config().use_cache = False
            with compat.quiet(), no_init_weights():
                auto = "AutoModelForImageTextToText" if self._multimodal else "AutoModelForCausalLM"
                model = getattr(transformers, auto).from_config(
                    config,
                    dtype=torch.float32,
                    attn_implementation=self._stage.attention,
                    trust_remote_code=self._stage.trust_remote_code,
                )
        except Exception as error:  # transformers raises anything for an odd config
            kind = "" if isinstance(error, ValueError | ImportError) else type(error).__name__
            reason = f"{kind}{': ' * bool(kind)}{error}"
            raise StageError(f"{self.name} cannot be built: {reason}") from error
        model.tie_weights()
        return cast("nn.Module", model)

    def tie(self, model: nn.Module) -> None:
        model.tie_weights()  # type: ignore[operator]

    @property
    def inference_view(self) -> ModelSource:
        without: dict[str, Any] = dict.fromkeys(CHANGES)
        unchanged = dataclasses.replace(self._stage, frozen=(), **without)
        if unchanged == self._stage:
            return self
        same = copy.copy(self)
        same._stage = unchanged
        same.__dict__.pop("frozen_base", None)
        return same

    @functools.cached_property
    def _outline(self) -> Any:
        """The module with parameters on the meta device (no memory), real buffers, weights tied."""
        return outline(self.inference_view)

    def blocks(self, model: Any, *, of_text: bool = True) -> Sequence[nn.Module]:
        classes = compat.block_classes(model)
        text = set((model.get_decoder() if self._multimodal else model).modules())
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = [one for each in lists for one in each if type(one).__name__ in classes]
        return [block for block in blocks if (block in text) == of_text]

    def tower_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return self.blocks(model, of_text=False)

    def ends(self, model: Any) -> tuple[nn.Module | None, nn.Module | None]:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if head is None or head is embedding:
            return None, None  # the table that is looked up makes the logits, too
        looks_up = getattr(type(embedding), "forward", None) is nn.Embedding.forward
        return embedding if looks_up else None, head

    def compiled_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        return () if self._stage.compile is None else self.blocks(model)

    @property
    def compiled_by(self) -> str | None:
        return None if self._stage.compile is None else self._stage.compile.backend

    def scorer(self, model: nn.Module, **how: Any) -> Scorer:
        from stages.objectives.scoring import ModelScorer

        return ModelScorer(model, **how)

    @property
    def vocab_size(self) -> int:
        return int(self._outline.get_input_embeddings().weight.shape[0])

    @property
    def most_positions(self) -> int | None:
        return table_of_positions(self.config.get_text_config().to_dict())

    @functools.cached_property
    def frozen_base(self) -> Collection[str]:
        """Every name of the tensors that patterns match."""
        if not self._stage.frozen:
            return ()
        named = dict(self._outline.named_parameters(remove_duplicate=False))
        found = {id(one) for name, one in named.items() if matches(name, self._stage.frozen)}
        return frozenset(name for name, one in named.items() if id(one) in found)

    def require_frozen(self) -> None:
        """Raise StageError for a pattern of `frozen` that matches nothing, and if all match."""
        patterns = self._stage.frozen
        named = dict(self._outline.named_parameters(remove_duplicate=False))
        refuse_idle("frozen", patterns, named, "parameter of the model")
        if len(self.frozen_base) == len(named):
            raise StageError(
                f"frozen: {', '.join(patterns)} matches all parameters, and none is left to train",
                hint="leave it out; an adapter freezes the model without it",
            )

    # Weights.

    @functools.cached_property
    def _whole(self) -> nn.Module:
        """The module with all of its parts, by whose names files are read; without memory."""
        whole: nn.Module = without_memory(self._built) if self._multimodal else self._outline
        return whole

    @functools.cached_property
    def _allowed(self) -> Allowed:
        parts = self._whole.state_dict().keys() - self._outline.state_dict().keys()
        tables = self._outline.get_input_embeddings(), self._outline.get_output_embeddings()
        rows = [
            f"{name}.{leaf}"
            for name, module in self._outline.named_modules()
            if self._resized and any(module is table for table in tables)
            for leaf, _ in module.named_parameters(recurse=False)
        ]
        stage = self._stage
        return Allowed(
            new=stage.new_weights, unused=stage.unused_weights, vocabulary=rows, towers=parts
        )

    @functools.cached_property
    def _weight_files(self) -> Sequence[Path]:
        """Files that weights are read from; none for random weights."""
        if self._random:
            return ()
        assert self._files is not None
        return weight_files(self._files.folder, self._files.gguf)

    def weights(self) -> TensorReader:
        model, tied = self._outline, ties(self._outline)
        drawn = functools.partial(RandomReader, model, self.blocks(model), tied, seed=self._seed)
        if self._random:
            return drawn()
        held = self._stored()
        try:
            where = str(self._files)
            fitted, unread = fit(where, held, model, tied, self._allowed, drawn, self._log)
            passed = "frozen, not in memory, and passed through to the export"
            for names, fate in ((unread.passed, passed), (unread.dropped, "dropped")):
                if names and fate not in self._said:
                    self._said.add(fate)
                    what = sized(names, held)
                    self._log.warning("not read from %s, %s: %s", self._files, fate, what)
            return fitted
        except BaseException:
            held.close()
            raise

    def _stored(self) -> ConvertedReader:
        """Tensors of the files, under the names of the module as far as they are known."""
        file = self._weight_files[0]
        if file.suffix.lower() == ".gguf":
            return open_gguf(file, self._outline)
        base = self._opened()
        return ConvertedReader(base, compat.changes_on_load(self._whole, base.names()))

    def _opened(self) -> TensorReader:
        """Tensors under their names in the files."""
        files = self._weight_files
        safe = bool(safetensors_files(files[0].parent))
        return SafetensorsReader(files) if safe else TorchFilesReader(files)

    def passed_through(self) -> TensorReader | None:
        if self._random:
            return None
        with contextlib.closing(self._stored()) as held:
            wanted, allowed = self._outline.state_dict().keys(), self._allowed
            unread = sort_out(held.names(), wanted, allowed.towers, allowed.unused)
            names = {source for name in unread.passed for source in held.sources(name)}
        if not names:
            return None
        file = self._weight_files[0]
        if file.suffix.lower() == ".gguf":
            raise StageError(
                f"tensors of {file} cannot be passed through to an export, which has others",
                hint="set `drop` in unused_weights",
            )
        return ConvertedReader(self._opened(), [renamed(one, one) for one in sorted(names)])

    def merge_trained(self, trained: Weights) -> Weights:
        return completed(self, trained)

    # Identity.

    @functools.cached_property
    def fingerprint(self) -> str:
        """Sha256 over the config, the weight files, and the seed and names of the weights drawn.

        Each file counts by its name, size, first and last MiB, which is cheap for any model; the
        header of a safetensors file begins with the first MiB.
        """
        stable = {k: value for k, value in self.config.to_dict().items() if k not in UNSTABLE}
        digest = hashlib.sha256(json.dumps(stable, sort_keys=True, default=str).encode())
        if self._random or self._resized or self._stage.new_weights:
            digest.update(f"random {self._seed}".encode())
            digest.update("\0".join(self._stage.new_weights).encode())
        for file in self._weight_files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with open_regular(file) as stream:
                digest.update(stream.read(EDGE))
                stream.seek(max(0, size - EDGE))
                digest.update(stream.read(EDGE))
        return digest.hexdigest()

    @functools.cached_property
    def sampled_contents(self) -> str | None:
        return sampled(self._weight_files) if self._weight_files else None

    @functools.cached_property
    def contents(self) -> str | None:
        if self._random:
            return None
        return hashlib.sha256("\n".join(file_digests(self._weight_files)).encode()).hexdigest()

    @property
    def location(self) -> str | None:
        drawn = self._random or self._resized or self._stage.new_weights
        if drawn or self._files is None or self._files.gguf:
            return None
        return self.name if not is_local(self.name) else str(self._files)

    @property
    def revision(self) -> str | None:
        if self.location is None or is_local(self.name) or self._files is None:
            return None
        commit = self._files.folder.name  # of the hub's cache
        return commit if COMMIT.fullmatch(commit) else None

    # Files next to the weights.

    def tokenizer(self) -> Any:
        files = self._tokenizer_files
        if files is None or not self._has_tokenizer:
            raise StageError(
                f"{self.name} comes without a tokenizer",
                hint="set `tokenizer` in the model's slot to a folder that has one",
            )
        if self._tokenizer is None:
            self._tokenizer = assets.open_tokenizer(files, self._stage, self._log)
        return self._tokenizer

    def processor(self) -> Any | None:
        if self._processor is None and self._files is not None:
            self._processor = assets.open_processor(self._files, self._stage, self.tokenizer)
        return self._processor

    def save_assets(self, folder: Path, *, dtype: str) -> None:
        model = self._outline
        torch_name = str(torch_dtype(cast("DtypeName", dtype))).removeprefix("torch.")
        origin = self._files.folder if self._files else None
        changes = ""
        with compat.quiet():
            processor = self._multimodal
            assets.save_files(self.config, model, origin, folder, torch_name, processor=processor)
            if self._has_tokenizer:
                assets.save_tokenizer(self.tokenizer(), folder)
                changes = "; ".join(assets.align(folder, self.tokenizer(), self.vocab_size))
        if changes and changes not in self._said:
            self._said.add(changes)  # an export saves twice
            self._log.warning(
                "the exported model begins, ends and pads as tokenizer and chat template do: %s",
                changes,
            )
