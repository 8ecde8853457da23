"""Recipe fields that choose and cut the data, shared by the data stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from pipeline import Problem
from pipeline.utils import HubName, path_problems
from stages.data.sources import each_pattern, file_problems, find_files
from stages.model.files import HUB_ID, REVISION


@dataclass(frozen=True, kw_only=True)
class Source:
    """One part of the data: local files, or a split of a data set on the Hugging Face hub."""

    files: str | tuple[str, ...] = ()
    """Paths or glob patterns, as in the slot's own `files`."""
    dataset: str | None = None
    """Id of a data set on the hub (owner/name), instead of `files`."""
    config: str | None = None
    """Configuration of the hub data set, if it has several."""
    split: str = "train"
    """Split of the hub data set; slices such as `train[:10%]` are understood."""
    revision: str | None = None
    """Commit (40 hexadecimal digits), branch or tag of the hub data set; the main branch by
    default. A run asks for the commit once, says it, and keeps it in its recipe."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of this source in the samples of an epoch, relative to the other sources' weights. Not
    used for held-out sources."""

    def __str__(self) -> str:
        if self.dataset is None:
            return ", ".join(each_pattern(self.files))
        return f"{self.dataset}{f'/{self.config}' if self.config else ''}/{self.split}"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Fields of stages that read sources."""

    files: str | tuple[str, ...] = ()
    """Paths or glob patterns of .txt, .jsonl, .json (an object a line, or one array of objects) or
    .parquet files; all but the last also with .gz. `./x` in a recipe is next to
    it, `x` in the working directory."""
    sources: tuple[Source, ...] = ()
    """Instead of `files`: several sources, mixed by weight. An epoch holds every sample of every
    source at least once, and repeats samples until the shares match the weights."""
    heldout_files: str | tuple[str, ...] = ()
    """Files to evaluate on, in the same formats as `files`."""
    heldout_sources: tuple[Source, ...] = ()
    """Instead of `heldout_files`: several sources to evaluate on, one after the other."""
    heldout_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Fraction of each source to hold out for evaluation, at least one row: the last rows in file
    order, set aside before any shuffling; with `turns: each`, whole conversations. Instead of
    `heldout_files` and `heldout_sources`."""
    cache: str | None = None
    """Folder for tokenised data. Default: `pipetrain` in $XDG_CACHE_HOME or ~/.cache."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """Processes that tokenise on each node. Changes speed, not the tokens. Default: one for each
    core that the node's first process may use."""

    @property
    def holds_out(self) -> bool:
        """Whether there is something to evaluate on."""
        return bool(self.heldout_files or self.heldout_sources or self.heldout_fraction)

    def hub_names(self) -> Iterator[HubName]:
        """Yield the data sets of the hub."""
        for field in ("sources", "heldout_sources"):
            for number, source in enumerate(getattr(self, field)):
                if source.dataset is not None and HUB_ID.fullmatch(source.dataset):
                    yield HubName(
                        kind="dataset", repo=source.dataset, revision=source.revision,
                        named_by=f"{field}.{number}.dataset", key=f"{field}.{number}.revision",
                    )  # fmt: skip

    def trained_on(self) -> tuple[Source, ...]:
        """Return the sources to train on."""
        return self.sources or (Source(files=self.files),)

    def held_out(self) -> tuple[Source, ...]:
        """Return the sources to evaluate on."""
        if self.heldout_files:
            return (Source(files=self.heldout_files),)
        return self.heldout_sources


@dataclass(frozen=True, kw_only=True)
class DocumentSettings:
    """Fields of stages that cut a stream of documents into blocks."""

    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Key or column of the text in JSON and Parquet rows."""
    documents: Literal["file", "line"] = "file"
    """Extent of a document in a .txt file: the whole file, or a line that is not blank."""
    documents_apart: bool = False
    """Let no token attend to another document's, and none predict the first token of the next."""
    bad_rows: Literal["error", "drop"] = "error"
    """Treatment of rows (lines of text, objects, rows of a table) that cannot be read or have no
    text: an error that shows the first of them and counts their kinds, or leave them out and say
    so. A file that cannot be read to its end is always an error."""
    sequence_length: Annotated[int, Field(ge=1)] = 1024
    """Tokens per sample. Each token predicts the next; the last one predicts the first of the next
    sample. The last sample of the stream may be shorter."""
    append_eos: bool = True
    """Put the tokenizer's end token after every document."""
    prepend_bos: bool | None = None
    """Put the tokenizer's start token before every document. Null does the same as the tokenizer
    does when it is called with a text: the tokenizers of Llama and Gemma put it there."""


def problems(selection: Selection) -> Iterator[Problem]:
    """Yield mistakes in the fields of a Selection that show without reading a file."""
    if selection.sources:
        yield from _source_problems("sources", selection.sources)
        if selection.files:
            yield _excludes("files", "sources")
    else:
        yield from file_problems("files", selection.files)
    if selection.heldout_files:
        yield from file_problems("heldout_files", selection.heldout_files)
    yield from _source_problems("heldout_sources", selection.heldout_sources)
    keys = ("heldout_files", "heldout_sources", "heldout_fraction")
    held = [key for key in keys if getattr(selection, key)]
    for key in held[1:]:
        yield _excludes(key, held[0])
    yield from _duplicates(selection)
    yield from path_problems("cache", selection.cache)


def _excludes(key: str, other: str) -> Problem:
    return Problem(message=f"excludes `{other}`", key=key, hint="leave out one of them")


def _source_problems(key: str, sources: tuple[Source, ...]) -> Iterator[Problem]:
    for index, source in enumerate(sources):
        for problem in _own_problems(source):
            place = f"{key}.{index}.{problem.key}"
            yield Problem(message=problem.message, key=place, hint=problem.hint)


def _own_problems(source: Source) -> Iterator[Problem]:
    if source.dataset is None:
        for key in ("config", "revision"):
            if getattr(source, key) is not None:
                yield Problem(message=f"`{key}` is only for a hub `dataset`", key=key)
        yield from file_problems("files", source.files)
        return
    if source.files:
        yield _excludes("files", "dataset")
    if not HUB_ID.fullmatch(source.dataset):
        message = f"{source.dataset!r} is not a hub id (owner/name)"
        yield Problem(message=message, key="dataset", hint="local files are named under `files`")
    elif source.revision is not None and not REVISION.fullmatch(source.revision):
        message = f"{source.revision!r} is not a commit, branch or tag"
        yield Problem(message=message, key="revision")


def _duplicates(selection: Selection) -> Iterator[Problem]:
    """Yield files and splits that are trained on twice, or are both trained on and held out."""
    seen: dict[object, str] = {}
    for index, source in enumerate(selection.sources):
        for content, name in _contents(source):
            if content in seen:
                key = f"sources.{index}"
                yield Problem(message=f"{name} is in {seen[content]} already", key=key)
            seen.setdefault(content, f"sources[{index}]")
    trained = {content for source in selection.trained_on() for content, _ in _contents(source)}
    for index, source in enumerate(selection.held_out()):
        for content, name in _contents(source):
            if content in trained:
                key = "heldout_files" if selection.heldout_files else f"heldout_sources.{index}"
                yield Problem(message=f"{name} is also trained on", key=key)


def _contents(source: Source) -> Iterator[tuple[object, str]]:
    """Yield an object that is equal for equal contents, and a name, for each part of a source."""
    if source.dataset is not None:
        yield (source.dataset, source.config, source.split), str(source)
        return
    for path in find_files(source.files):
        yield path.resolve(), str(path)
