"""The model of a recipe, before any of its parameters exists, and readers: named tensors that lie
elsewhere, read range by range."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.errors import StageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from pipeline.contracts.objective import Scorer


class TensorSpec(NamedTuple):
    """Facts of a tensor that are known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize


class TensorReader(ABC):
    """Named tensors stored elsewhere; any range of one can be read."""

    bytes_read: int = 0
    """Bytes of tensors that were read from files so far."""
    as_stored: bool = False
    """Whether values are read from files unchanged: reading again is a copy from the page cache."""

    @abstractmethod
    def names(self) -> Collection[str]:
        """Names as in the model's state dict, of tied tensors one or all."""

    @abstractmethod
    def spec(self, name: str) -> TensorSpec:
        """Full shape and stored dtype. Raises StageError if `name` is not there."""

    @abstractmethod
    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """Elements [start, stop) of the flattened tensor, in order, as flat tensors of a few MiB on
        the CPU in the stored dtype, each valid until the next is taken. Raises StageError."""

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill the flat tensor `out`, of any dtype and device, with the elements from `start` on of
        the flattened tensor, cast to its dtype. Raises StageError."""
        done = 0
        for chunk in self.chunks(name, start, start + out.numel()):
            out[done : done + chunk.numel()].copy_(chunk)
            done += chunk.numel()
        if done != out.numel():
            raise StageError(f"{name}: {done} elements came where {out.numel()} were asked for")

    def read(self, name: str) -> Tensor:
        """The full tensor in its stored dtype. Raises StageError if `name` is not there."""
        import torch

        spec = self.spec(name)
        flat = torch.empty(spec.numel, dtype=spec.dtype)
        self.read_into(name, 0, flat)
        return flat.view(spec.shape)

    def close(self) -> None:
        """Release files and caches."""


class Weights(TensorReader):
    """Named full tensors of the trained model, streamed from a checkpoint, never all in memory."""

    identity: str
    """Equal for equal contents; an interrupted export continues only with the same identity."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names():
            yield name, self.read(name)


class ModelSource(ABC):
    """A causal language model, declared. No parameter exists until a wrap stage calls `build`."""

    name: str
    """Name for people: the folder, hub id or file of the source."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Construct the module, without reading or initialising weights, under whatever context the
        caller opened (empty parameters, a strategy's own init). Parameters are declared in fp32;
        weights are tied; buffers hold their real values unless the context prevents that."""

    @abstractmethod
    def weights(self) -> TensorReader:
        """Open the source's weights, under the names of `build`'s module and with its shapes; for a
        random initialisation, a pure function of the seed. Raises StageError, naming the tensors
        that are missing, unexpected or of another shape."""

    @abstractmethod
    def tie(self, model: nn.Module) -> None:
        """Tie again the weights that the architecture shares (after a context untied them)."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks of the language model, in order; empty when the architecture is not
        known."""

    def tower_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks of other parts, such as a vision tower, in order: sharded block by
        block too, but not recomputed, compiled, or divided into stages."""
        return ()

    def ends(self, model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
        """The input embedding, if it is a plain table whose rows are looked up, and the head; each
        None where there is none. They may share a weight; one that is both is neither."""
        return None, None

    def external_parameter_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Modules that, other than by calling them, use parameters of the modules inside them."""
        return ()

    def compiled_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Modules that are compiled, each as a whole."""
        return ()

    @property
    def compiled_by(self) -> str | None:
        """Backend of torch.compile for these modules; None for a model that is not compiled."""
        return None

    @abstractmethod
    def tokenizer(self) -> Any:
        """The `transformers` tokenizer; raises StageError when the source has none."""

    def processor(self) -> Any | None:
        """The `transformers` processor, which prepares more than text; None without one. Raises
        StageError for one that cannot be opened."""
        return None

    @abstractmethod
    def scorer(
        self,
        model: nn.Module,
        *,
        group: ProcessGroup | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> Scorer:
        """Return a scorer that runs `model`: the module of `build`, wrapped, or cut to a stage of a
        pipeline. Ranks of `group` have slices of the same sequences; `forward` is called instead of
        the model."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Rows of the input embedding."""

    @property
    def most_positions(self) -> int | None:
        """Most tokens of a text, if its positions are rows of a table; None without such an end."""
        return None

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hex digest of architecture and weights identity; equal sources have equal digests. Quick:
        it need not look at every byte."""

    @property
    def sampled_contents(self) -> str | None:
        """Hex digest of pieces of the files that `weights` reads, by which all ranks are compared;
        None when it reads none. Quick, but more than `fingerprint` looks at."""
        return None

    @property
    def contents(self) -> str | None:
        """Hex digest of all bytes of the files that `weights` reads; None when it reads none. The
        first call on a machine takes as long as reading them."""
        return None

    @property
    def location(self) -> str | None:
        """Folder or hub id from which others load the model; None where they cannot."""
        return None

    @property
    def revision(self) -> str | None:
        """Commit of `location`, if that is a hub id."""
        return None

    @property
    def frozen_base(self) -> Collection[str]:
        """Names of parameters that are not trained and that `weights` can read again at any time:
        strategies hold them in the compute dtype, and checkpoints leave them out."""
        return ()

    @property
    def inference_view(self) -> ModelSource:
        """The same model without what only training needs, such as compiled blocks."""
        return self

    @property
    def export_view(self) -> ModelSource:
        """The model as others load it: the plain one, unless training has added to it."""
        return self.inference_view

    @property
    def training_view(self) -> ModelSource:
        """The model of `export_view` with what only training needs, to train the result further."""
        return self

    @property
    def skeleton(self) -> ModelSource:
        """A model that is quicker to build, with blocks alike exactly where this model's are."""
        return self

    def merge_trained(self, trained: Weights) -> Weights:
        """The tensors of `export_view`, computed from a checkpoint of this model."""
        return trained

    def passed_through(self) -> TensorReader | None:
        """Open the tensors of the source's files that are not part of the module, and that an
        export holds as they are, under their names there; None if there are none."""
        return None

    @abstractmethod
    def save_assets(self, folder: Path, *, dtype: str) -> None:
        """Write all but the weights that `transformers` needs to load the model: config with the
        right architecture and `dtype`, generation config, tokenizer, chat template."""
