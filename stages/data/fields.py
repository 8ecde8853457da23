"""Recipe fields of the data stages, and mistakes in them that show without reading a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from pipeline import Problem
from pipeline.utils import HubName, path_problems
from stages.data.messages import Names
from stages.data.sources import Source, file_problems, find_files
from stages.model.files import HUB_ID, REVISION


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
        for key in ("sources", "heldout_sources"):
            for number, source in enumerate(getattr(self, key)):
                if source.dataset is not None and HUB_ID.fullmatch(source.dataset):
                    yield HubName(
                        kind="dataset", repo=source.dataset, revision=source.revision,
                        named_by=f"{key}.{number}.dataset", key=f"{key}.{number}.revision",
                    )  # fmt: skip

    def all_sources(self) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
        """Return the sources to train on, and those to evaluate on."""
        held = (Source(files=self.heldout_files),) if self.heldout_files else self.heldout_sources
        return self.sources or (Source(files=self.files),), held


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


@dataclass(frozen=True, kw_only=True)
class StreamFields(DocumentSettings):
    """Fields of `data.stream`."""

    shards: str | tuple[str, ...]
    """Files, as in `data.text`: paths or glob patterns, or addresses of files in object stores
    or on web servers, such as `s3://bucket/corpus/*.jsonl.gz`."""
    window: Annotated[int, Field(ge=1)] = 8
    """Shards whose blocks are mixed. Each node needs room for the tokens of (`ahead` + 2) windows,
    and for one shard itself if shards are not local files."""
    ahead: Annotated[int, Field(ge=0)] = 1
    """Windows that are prepared, in a thread, before they are needed."""
    heldout_files: str | tuple[str, ...] = ()
    """Local files to evaluate on."""
    cache: str | None = None
    """Folder on each node for the tokens of windows, removed when the run ends, and of
    `heldout_files`. Default: `pipetrain` in $XDG_CACHE_HOME or ~/.cache."""

    @property
    def holds_out(self) -> bool:
        """Whether there is something to evaluate on."""
        return bool(self.heldout_files)


@dataclass(frozen=True, kw_only=True)
class ChatSource(Source):
    """A source whose rows may use other names."""

    columns: dict[str, str] = field(default_factory=dict)
    """As the slot's `columns`, instead of them."""
    role_names: dict[str, str] = field(default_factory=dict)
    """As the slot's `role_names`, instead of them."""


@dataclass(frozen=True, kw_only=True)
class ChatFields(Selection):
    """Fields of `data.chat`."""

    sources: tuple[ChatSource, ...] = ()
    heldout_sources: tuple[ChatSource, ...] = ()
    form: (
        Literal["messages", "sharegpt", "prompt/completion", "alpaca", "text", "input_ids"] | None
    ) = None
    """The form of all rows, for rows whose keys fit several. Null finds it by each row's keys."""
    roles: tuple[str, ...] = ()
    """Further roles of messages that the template knows, next to system, developer, user, assistant
    and tool."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names that the rows have for keys of theirs and of their messages, by the names used here:
    `{messages: dialog, role: speaker, content: text}`. What has the name of a key that another one
    stands for is not read."""
    role_names: dict[str, str] = field(default_factory=dict)
    """Roles that are meant by other names: `{bot: assistant}`."""
    template: bool = True
    """Whether a text prompt and its completion are a user's and an assistant's turn of the chat
    template. False joins them without it (Alpaca's with Alpaca's prompt), with the tokenizer's end
    token after the completion; messages always take the template."""
    today: str = "2024-07-26"
    """Date (YYYY-MM-DD) for templates that ask for today's, so that rows become the same tokens on
    every day. The default is the date that Llama 3.1's template falls back on."""
    loss: Literal["completion", "assistant", "last", "all"] = "completion"
    """Tokens that are trained on: the assistant's messages after the row's prompt (all of them in
    rows without one); all the assistant's messages; only its last turn, which suits templates that
    leave out parts of earlier answers; or all tokens. All of a `text` is trained on; `input_ids`
    have their own mask."""
    turns: Literal["together", "each"] = "together"
    """Whether a conversation is one sample, laid out whole, or each trained turn is
    a separate sample with the turns before it, laid out as at inference. Templates that leave the
    thoughts out of earlier turns need `each` (or `loss: last`) to train on all thoughts."""
    unrendered: Literal["error", "drop", "allow"] = "error"
    """Treatment of a row when the template leaves out part of it: a content, a call or its
    arguments, or the thoughts of a trained turn. `allow` trains on the rest."""
    empty: Literal["error", "drop", "train"] = "train"
    """Treatment of a row with an answer that says nothing: `train` trains on its end of turn."""
    special_tokens: Literal["error", "drop", "allow"] = "error"
    """Treatment of a row whose own text spells a special token of the tokenizer, such as the end of
    a turn. `allow` lets the text become that token."""
    prepend_bos: bool | None = None
    """Put the tokenizer's start token before a `text`, and before a pair that takes no template.
    Null does the same as the tokenizer does when it is called with a text: the tokenizers of Llama
    and Gemma put it there. A chat template has its own."""
    bad_rows: Literal["error", "drop"] = "error"
    """Treatment of rows that cannot be read or laid out: an error that shows the first of them and
    counts their kinds, or leave them out and say so. A file that cannot be read to its end is
    always an error."""
    sequence_length: Annotated[int, Field(ge=2)] = 1024
    """Largest number of tokens per sample, as the tokenizer counts them: the last one is only
    predicted, so the model is given one less."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """Treatment of a longer row. A row that is truncated before its first target is dropped."""
    packing: bool = False
    """Put several rows in one sample of at most `sequence_length` tokens, by best fit. No row is
    cut, sees another or predicts its beginning."""

    def names(self, source: Source | None = None) -> Names:
        """Return the names in a source: its own, or else the slot's."""
        own = source if isinstance(source, ChatSource) else self
        return Names(
            columns=own.columns or self.columns,
            role_names=own.role_names or self.role_names,
            roles=self.roles,
        )


def problems(fields: Selection) -> Iterator[Problem]:
    """Yield mistakes in the fields of a Selection that show without reading a file."""
    if not fields.sources:
        yield from file_problems("files", fields.files)
    elif fields.files:
        yield _excludes("files", "sources")
    if fields.heldout_files:
        yield from file_problems("heldout_files", fields.heldout_files)
    for key in ("sources", "heldout_sources"):
        for index, source in enumerate(getattr(fields, key)):
            for problem in _mistakes(source):
                yield replace(problem, key=f"{key}.{index}.{problem.key}")
    held = [key for key in ("files", "sources", "fraction") if getattr(fields, f"heldout_{key}")]
    for key in held[1:]:
        yield _excludes(f"heldout_{key}", f"heldout_{held[0]}")
    # Files and splits that are trained on twice, or are both trained on and held out.
    (trained, heldout), seen = fields.all_sources(), dict[object, int]()
    for index, source in enumerate((*trained, *heldout)):
        split = (source.dataset, source.config, source.split)
        files = [(path.resolve(), str(path)) for path in find_files(source.files)]
        for content, name in [(split, str(source))] if source.dataset else files:
            first = seen.setdefault(content, index)
            if first < index < len(trained):
                message = f"{name} is in sources[{first}] already"
                yield Problem(message=message, key=f"sources.{index}")
            elif first < len(trained) <= index:
                key = f"heldout_sources.{index - len(trained)}"
                key = "heldout_files" if fields.heldout_files else key
                yield Problem(message=f"{name} is also trained on", key=key)
    yield from path_problems("cache", fields.cache)


def _excludes(key: str, other: str) -> Problem:
    return Problem(message=f"excludes `{other}`", key=key, hint="leave out one of them")


def _mistakes(source: Source) -> Iterator[Problem]:
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
