"""The model of a recipe, before any of its parameters exists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from pipeline.contracts.objective import Scorer
    from pipeline.contracts.tensors import TensorReader, Weights


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
