"""The typed values that stages hand to each other. Importing this imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pipeline.errors import CheckpointError, StageError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from pipeline.contracts.sample_order import Order
    from pipeline.contracts.stage import Room
    from pipeline.length import Length

DtypeName = Literal["fp32", "bf16", "fp16"]

NO_TARGET = -100
"""Label of a position that is not trained on (torch's cross_entropy `ignore_index`)."""


class Durable(ABC):
    """An artifact that survives its process: the journal keeps `record()`, resume calls
    `restore()`."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Everything that is needed to find the artifact again, as JSON."""

    @classmethod
    @abstractmethod
    def restore(cls, record: Mapping[str, Any]) -> Durable:
        """The artifact from its record; raises StageError when it is gone."""


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
    """Named tensors that are somewhere else, of which any range can be read."""

    bytes_read: int = 0
    """Bytes of tensors that were read from files so far."""
    as_stored: bool = False
    """Whether values are what files hold, not computed from it: to read them once more costs no
    more than a copy out of the page cache."""

    @abstractmethod
    def names(self) -> Collection[str]:
        """As in the model's state dict. Tied tensors may be listed once or under every name."""

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


class ModelSource(ABC):
    """A causal language model, declared. No parameter exists until a wrap stage calls `build`."""

    name: str
    """Its name for people: the folder, hub id or file it comes from."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Construct the module, without reading or initialising weights, under whatever context the
        caller opened (empty parameters, a strategy's own init). Parameters are declared in fp32;
        weights are tied; buffers hold their real values unless the context prevents that."""

    @abstractmethod
    def weights(self) -> TensorReader:
        """Open the source's weights, under the names of `build`'s module and with its shapes; for a
        random initialisation, a pure function of the seed. Raises StageError, naming the tensors
        that are missing, too much or of another shape."""

    @abstractmethod
    def tie(self, model: nn.Module) -> None:
        """Tie again the weights that the architecture shares (after a context untied them)."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated transformer blocks, in order; empty when they cannot be told."""

    def reaching(self, model: nn.Module) -> Sequence[nn.Module]:
        """Modules that, other than by calling them, use parameters of the modules inside them."""
        return ()

    def compiled(self, model: nn.Module) -> Sequence[nn.Module]:
        """Modules that are compiled, each as a whole."""
        return ()

    @abstractmethod
    def tokenizer(self) -> Any:
        """The `transformers` tokenizer; raises StageError when the source has none."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Rows of the input embedding."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hex digest of architecture and weights identity; equal sources have equal digests. Quick:
        it need not look at every byte."""

    @property
    def contents(self) -> str | None:
        """Hex digest of all bytes of the files that `weights` reads; None when it reads none. Takes
        as long as reading them, the first time that a machine is asked."""
        return None

    @property
    def location(self) -> str | None:
        """The place that others load it from, a folder or a hub id; None when it is nowhere as it
        is, being random or changed, or stored in a form that they do not load by itself."""
        return None

    @property
    def revision(self) -> str | None:
        """Commit of `location`, if that is a hub id."""
        return None

    @property
    def borrowed(self) -> Collection[str]:
        """Names of parameters that are not trained and that `weights` gives again at any time:
        strategies hold them in the compute dtype, and checkpoints leave them out."""
        return ()

    @property
    def plain(self) -> ModelSource:
        """The same model, computing by itself: without what only training wants of its module, such
        as compiled blocks or products in fewer bits."""
        return self

    @property
    def exported(self) -> ModelSource:
        """The model as others load it: the plain one, unless training has added to it."""
        return self.plain

    @property
    def skeleton(self) -> ModelSource:
        """A model of which the same blocks are alike as of this one, quicker to build."""
        return self

    def assemble(self, trained: Weights) -> Weights:
        """The tensors of `exported`, from what a checkpoint of this model holds."""
        return trained

    @abstractmethod
    def save_assets(self, folder: Path, *, dtype: str) -> None:
        """Write everything but the weights that `transformers` needs to load the model: config with
        the right architecture and `dtype`, generation config, tokenizer, chat template."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes with one meaning under every strategy.

    master: the dtype the optimizer updates. compute: parameters, activations and inputs of forward
    and backward. reduce: gradients while they are reduced over ranks. buffer: floating buffers;
    None keeps what the model declares. The loss and the gradient norm are always fp32.
    """

    master: DtypeName
    compute: DtypeName
    reduce: DtypeName
    buffer: DtypeName | None
    loss_scaling: LossScaling | None
    """Set exactly when `compute` is fp16."""


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Dynamic loss scaling (Micikevicius et al. 2018, Mixed Precision Training, section 3.2):
    doubled after `growth_interval` steps without overflow, halved (and the step skipped) on one."""

    initial_scale: float = 65536.0
    growth_interval: int = 2000


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training example. `labels[t]` is the token to be predicted at position t (already shifted
    against `input_ids`), or NO_TARGET. All int64, shape (length,)."""

    input_ids: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any] | None = None
    """The place of each token in its document, which begins anew at 0 with each of several in one
    sample. No token attends to another document's. None: one document."""


class Samples(ABC):
    """A map-style sample set. Everything is a pure function of the index; indices are those that
    `order` gives: 0 to `len` - 1, unless the set says otherwise."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @abstractmethod
    def targets(self, index: int) -> int:
        """How many labels of this sample are trained on; known without reading the sample."""

    def total_targets(self, indices: NDArray[np.int64]) -> int:
        """The sum of `targets` over indices, any of which can come several times. Every rank asks
        it of every global batch, so a set that can tell many at once does."""
        return sum(map(self.targets, indices.tolist()))

    def order(self, seed: int, *, shuffle: bool) -> Order:
        """The indices in the order in which a run visits them, epoch after epoch."""
        from pipeline.contracts.sample_order import SampleOrder

        return SampleOrder(seed, len(self), shuffle=shuffle)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Samples that a run trains and evaluates on."""

    train: Samples
    heldout: Samples | None
    pad_id: int
    """Token that fills `input_ids` behind a short sample; its labels are NO_TARGET."""
    packed: bool = False
    """Whether samples can hold several documents: whether they have `positions`."""
    identity: Mapping[str, str | int | float | None]
    """Everything that decides what a sample is: digests of the files and of the `tokenizer`, and
    every setting that changes one. Equal identities have equal samples."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of the identity."""
        text = json.dumps(dict(self.identity), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class NamedParameter(NamedTuple):
    """A parameter with its name and its full shape, which a partitioned parameter itself cannot
    tell."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    shard: int = 0
    """Number of the shard that this process holds. Replicas have the same; one shard is 0."""


class Packing(ABC):
    """How an optimizer keeps moments that are no tensors of the parameter's shape.

    A parameter's state in the optimizer is a mapping, all of whose values but the count of updates
    are what `start` made. Of a sharded parameter it is about this process's elements alone.
    """

    @abstractmethod
    def start(self, parameter: Tensor, count: int) -> dict[str, Tensor]:
        """State of a parameter before its first update: `count` elements, with the dtype and on the
        device of `parameter`."""

    @abstractmethod
    def unpack(self, state: Mapping[str, Any], moment: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a moment as a flat tensor: a live view or a copy."""

    @abstractmethod
    def pack(self, state: Mapping[str, Any], moment: str, values: Tensor) -> None:
        """Make all elements of a moment be `values`, what `unpack` gave and somebody has
        overwritten. What was unpacked from any state is unpacked again to the same bits."""


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """Factories for the optimizer and its schedule."""

    algorithm: str
    """Name of the update rule (`adamw`). A strategy may run its own kernel of the same rule. Where
    the stage has an attribute of this name too, strategies can check it before anything starts."""
    hyperparameters: Mapping[str, Any]
    """Arguments of the rule's torch class: lr, betas, eps, weight_decay."""
    groups: Callable[[Iterable[NamedParameter]], list[dict[str, Any]]]
    """A model's parameters -> torch parameter groups, each with `params` and its overrides."""
    moments: Sequence[str]
    """Names of what the optimizer keeps for each element of a parameter. Without a `packing`, keys
    of its state that are tensors of the parameter's shape, zeros at first."""
    packing: Packing | None = None
    counts_updates: bool = True
    """Whether the optimizer's state has a `step`, the number of updates of the parameter."""
    build: Callable[[list[dict[str, Any]]], Optimizer]
    """Parameter groups -> torch optimizer."""
    lr_scale: Callable[[int, int], float]
    """(zero-based step, total steps) -> factor on every group's base learning rate."""
    doubts: Callable[[int], Iterable[str]] = lambda total: ()
    """Total steps -> what is hardly meant of a training of so many; warnings for people."""
    max_grad_norm: float | None


@dataclass(kw_only=True)
class Progress:
    """How far training has come. Counts are over all ranks; JSON in every checkpoint."""

    step: int = 0
    """Optimizer steps done, those skipped for overflow too; not those that were left out as
    anomalous, whose place the next batch takes."""
    samples: int = 0
    """Global index of the next sample: position in the endless shuffled sequence."""
    tokens: int = 0
    """Target tokens trained on."""
    skipped: int = 0
    """Steps skipped for overflow."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The latest `loss`; `eval_loss` and `perplexity` if these weights were evaluated."""
    best: dict[str, float] = field(default_factory=dict)
    """The lowest held-out loss so far, `eval_loss`, and the `step` at which it was reached; empty
    before the first evaluation."""
    patience: dict[str, float] = field(default_factory=dict)
    """State of early stopping: the `eval_loss` to improve on, and for how many `evaluations` none
    did."""
    stopped: str = ""
    """Why training ended before its last step, if it did."""
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the newest steps, where loss spikes are looked for; oldest first."""
    left_out: list[list[int]] = field(default_factory=list)
    """Positions of the sample order that no update is from, as [start, stop) in ascending order:
    those of anomalous steps, and of steps that a rollback undid."""
    left_out_in_a_row: int = 0
    """Anomalous steps since the last update."""
    rollbacks: int = 0
    """How often training went back to a checkpoint."""
    origin: dict[str, Any] = field(default_factory=dict)
    """Facts without which the position means nothing: model, tokenizer, data, seed, order, global
    batch."""

    def differs_from(self, recorded: Mapping[str, Any]) -> bool:
        """Whether a record of this step's progress is out of date. Another origin alone is no news:
        nothing has been trained under it."""
        return {**recorded, "origin": None} != {**vars(self), "origin": None}

    def taken_over(self) -> Progress:
        """The position of a new run which starts from here: as far on, in the data too, and nothing
        of what evaluations and anomalies meant to this one."""
        return Progress(
            step=self.step,
            samples=self.samples,
            tokens=self.tokens,
            skipped=self.skipped,
            recent_losses=list(self.recent_losses),
            origin=self.origin,
        )


class Checkpoints(ABC):
    """Where, when and in which format a run saves its training state and resumes from it."""

    @abstractmethod
    def due(self, progress: Progress) -> bool:
        """Whether a checkpoint is to be written now."""

    @abstractmethod
    def save(self, progress: Progress) -> None:
        """Save the engine's whole state (collective). May return before it is on disk, but not
        before the engine may change. Where the newest checkpoint is of this step, it is of the same
        state, and gets the progress alone. Raises CheckpointError when it, or the save before it,
        fails.
        """

    @abstractmethod
    def finish(self) -> str:
        """Wait until everything that was saved is on disk (collective); the address of the newest
        checkpoint. Raises CheckpointError when a save has failed."""

    @abstractmethod
    def restore(self, admit: Callable[[Progress], None]) -> Progress | None:
        """Load the newest complete checkpoint into the engine (collective); None if there is none.
        Can be called again in the middle of a training, to go back.

        `admit` is given the progress that it holds before anything is loaded, and raises if that
        is not to be continued. Raises CheckpointError when what is there cannot be.
        """

    def room(self, length: Length) -> Iterator[Room]:
        """Room that the checkpoints of a training of that length will need; called on rank 0 alone,
        before the first step."""
        return iter(())

    def best(self) -> TrainedRun:
        """The checkpoint with the lowest held-out loss among those that are there, once `finish`
        has returned (collective). Raises CheckpointError when there is none."""
        raise CheckpointError("these checkpoints do not tell which one is the best")


@dataclass(frozen=True, kw_only=True)
class TrainedRun(Durable):
    """A finished training: the checkpoint that later stages take, and how far it had come."""

    checkpoint: str
    """Its address: a path, or what fsspec knows."""
    progress: Progress

    def record(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint,
            "progress": vars(self.progress),
        }

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> TrainedRun:
        checkpoint = str(record["checkpoint"])
        if "://" not in checkpoint and not Path(checkpoint).is_dir():
            raise CheckpointError(f"the trained checkpoint is gone: {checkpoint}")
        return cls(checkpoint=checkpoint, progress=Progress(**record["progress"]))


class Weights(TensorReader):
    """Named full tensors of the trained model, streamed from a checkpoint, never all in memory."""

    identity: str
    """Equal for equal contents: what tells an interrupted export that it can go on."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names():
            yield name, self.read(name)


EXPORT_MANIFEST = "export.json"
"""File of an exported model's folder that says which stage wrote it (`writer`) and how it can be
verified."""


@dataclass(frozen=True, kw_only=True)
class ExportedModel(Durable):
    """A folder that `transformers` loads, proven by loading it."""

    folder: Path
    files: Sequence[str]
    total_bytes: int

    def record(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "files": list(self.files),
            "total_bytes": self.total_bytes,
        }

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> ExportedModel:
        from pipeline.errors import ExportError

        folder = Path(record["folder"])
        missing = [name for name in record["files"] if not (folder / name).exists()]
        if missing:
            raise ExportError(f"the exported model is gone: {folder / missing[0]}")
        return cls(folder=folder, files=record["files"], total_bytes=record["total_bytes"])


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a DtypeName."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The DtypeName of a torch dtype; torch's own name for those that a recipe cannot ask for."""
    import torch

    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
