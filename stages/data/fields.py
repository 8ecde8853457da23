"""The fields that say which data are trained on and which are held out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from pipeline.errors import Problem, StageError
from stages.data import files
from stages.model.files import COMMIT, HUB_ID


@dataclass(frozen=True, kw_only=True)
class Source:
    """One part of the data: local files, or a split of a data set on the Hugging Face hub."""

    files: str | tuple[str, ...] = ()
    """Paths or glob patterns, as in the slot's own `files`."""
    dataset: str | None = None
    """Id of a data set on the hub (owner/name), instead of `files`."""
    config: str | None = None
    """Configuration of the hub data set, where it has several."""
    split: str = "train"
    """Split of the hub data set; slices such as `train[:10%]` are understood."""
    revision: str | None = None
    """Commit of the hub data set: 40 hexadecimal digits. Required."""
    allow_floating_revision: bool = False
    """Accept a branch or tag (or no revision: the main branch). The run then depends on when it was
    started."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of this source in the samples of an epoch, relative to the other sources' weights.
    Without meaning for what is held out."""

    def __str__(self) -> str:
        if self.dataset is None:
            return ", ".join(files.each(self.files))
        return f"{self.dataset}{f'/{self.config}' if self.config else ''}/{self.split}"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Base of stages that read sources."""

    files: str | tuple[str, ...] = ()
    """Paths or glob patterns of .txt, .jsonl, .json (an object a line, or one array of objects) or
    .parquet files; all but the last also with .gz. Relative to the working directory."""
    sources: tuple[Source, ...] = ()
    """Instead of `files`: several sources, mixed by weight. An epoch holds every sample of every
    source at least once, and of each source as many as make the shares those of the weights."""
    heldout_files: str | tuple[str, ...] = ()
    """Files to evaluate on, in the same forms as `files`."""
    heldout_sources: tuple[Source, ...] = ()
    """Instead of `heldout_files`: several sources to evaluate on, one behind the other."""
    heldout_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Hold out this part of each source for evaluation, at least one row: the last ones in file
    order, set aside before any shuffling. Instead of `heldout_files` and `heldout_sources`."""
    cache: str | None = None
    """Folder for tokenised data. Default: `pipetrain` in $XDG_CACHE_HOME or ~/.cache."""

    @property
    def holds_out(self) -> bool:
        """Whether there is something to evaluate on."""
        return bool(self.heldout_files or self.heldout_sources or self.heldout_fraction)

    workers: Annotated[int, Field(ge=1)] | None = None
    """Processes that tokenise on each node. Changes speed, not the tokens. Default: one for each
    core that the node's first process may use."""

    def trained_on(self) -> tuple[Source, ...]:
        """The sources to train on."""
        return self.sources or (Source(files=self.files),)

    def held_out(self) -> tuple[Source, ...]:
        """The sources to evaluate on."""
        if self.heldout_files:
            return (Source(files=self.heldout_files),)
        return self.heldout_sources


def problems(selection: Selection) -> Iterator[Problem]:
    """Mistakes in these fields that show without reading a file."""
    if selection.sources:
        yield from _sources("sources", selection.sources)
        if selection.files:
            yield _excludes("files", "sources")
    else:
        yield from files.problems("files", selection.files)
    if selection.heldout_files:
        yield from files.problems("heldout_files", selection.heldout_files)
    yield from _sources("heldout_sources", selection.heldout_sources)
    held = [key for key in ("heldout_files", "heldout_sources") if getattr(selection, key)]
    if len(held) == 2:
        yield _excludes(held[1], held[0])
    if selection.heldout_fraction and held:
        yield _excludes("heldout_fraction", held[0])
    yield from _twice(selection)


def _excludes(key: str, other: str) -> Problem:
    return Problem(message=f"excludes `{other}`", key=key, hint="leave out one of them")


def _sources(key: str, sources: tuple[Source, ...]) -> Iterator[Problem]:
    for index, source in enumerate(sources):
        for problem in _source(source):
            yield Problem(
                message=problem.message, key=f"{key}.{index}.{problem.key}", hint=problem.hint
            )


def _source(source: Source) -> Iterator[Problem]:
    if source.dataset is None:
        for key in ("config", "revision"):
            if getattr(source, key) is not None:
                yield Problem(message=f"`{key}` is only for a hub `dataset`", key=key)
        yield from files.problems("files", source.files)
        return
    if source.files:
        yield _excludes("files", "dataset")
    if not HUB_ID.fullmatch(source.dataset):
        yield Problem(
            message=f"{source.dataset!r} is no hub id (owner/name)",
            key="dataset",
            hint="local files are named under `files`",
        )
    elif not source.allow_floating_revision:
        yield from _revision(source)


def _revision(source: Source) -> Iterator[Problem]:
    if source.revision is None:
        yield Problem(
            message=f"the hub data set {source.dataset} needs `revision`, the commit to use",
            key="dataset",
            hint="set `revision` to 40 hexadecimal digits, or `allow_floating_revision: true`",
        )
    elif not COMMIT.fullmatch(source.revision):
        yield Problem(
            message=f"{source.revision!r} is not a commit (40 hexadecimal digits)",
            key="revision",
            hint="give the commit, or set `allow_floating_revision: true`",
        )


def _twice(selection: Selection) -> Iterator[Problem]:
    """What is trained on twice, or is both trained on and held out."""
    seen: dict[object, str] = {}
    for index, source in enumerate(selection.sources):
        for what, shown in _contents(source):
            if what in seen:
                key = f"sources.{index}"
                yield Problem(message=f"{shown} is in {seen[what]} already", key=key)
            seen.setdefault(what, f"sources[{index}]")
    known = {what for source in selection.trained_on() for what, _ in _contents(source)}
    held = [("heldout_files", Source(files=selection.heldout_files))]
    held += [(f"heldout_sources.{i}", each) for i, each in enumerate(selection.heldout_sources)]
    for key, source in held:
        for what, shown in _contents(source):
            if what in known:
                yield Problem(message=f"{shown} is also trained on", key=key)


def _contents(source: Source) -> Iterator[tuple[object, str]]:
    """What a source holds: something that is equal for equal things, and its name."""
    if source.dataset is not None:
        yield (source.dataset, source.config, source.split), str(source)
        return
    for path in files.expand(source.files):
        yield path.resolve(), str(path)


@dataclass(frozen=True, kw_only=True)
class DocumentSettings:
    """Base of stages that cut a stream of documents into blocks."""

    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Key or column of the text in JSON and Parquet rows."""
    documents: Literal["file", "line"] = "file"
    """What one document of a .txt file is: the whole file, or every line that is not blank."""
    documents_apart: bool = False
    """Let no token attend to another document's, and none predict the first token of the next."""
    sequence_length: Annotated[int, Field(ge=1)] = 1024
    """Tokens per sample. The last one of the stream may be shorter."""
    append_eos: bool = True
    """Put the tokenizer's end token behind every document."""
    prepend_bos: bool | None = None
    """Put the tokenizer's start token before every document. Null does what the tokenizer itself
    does when it is called with a text: those of Llama and Gemma begin it with that token."""
    batch_documents: Annotated[int, Field(ge=1)] = 256
    """Documents per call of the tokenizer. Changes memory and speed, not the tokens."""


def split(count: int, fraction: float) -> int:
    """How many of `count` samples are for training when the last `fraction` is held out.

    At least one sample is held out when `fraction` is above 0. Raises StageError when none is left.
    """
    held = max(1, round(count * fraction)) if fraction > 0 else 0
    if held >= count:
        raise StageError(
            f"holding out {fraction:g} of {count} samples leaves none to train on",
            hint="use more data, shorter samples or `heldout_files`",
        )
    return count - held
