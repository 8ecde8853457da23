"""Look at the rows of files: how many, which are broken, how long."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import Context, DataError, ModelSource, StageError, UsageError
from pipeline.planning import reads_back
from pipeline.utils import activity, expanded
from stages.data import tokenize
from stages.data.documents import read_documents
from stages.data.encode import EMPTY, Dropped, Encoded, RowEncoder
from stages.data.fields import ChatFields
from stages.data.forms import read, rows_with_forms
from stages.data.messages import Conversation, Names
from stages.data.mistakes import Mistake, Mistakes
from stages.data.rows import TEXT, Row
from stages.data.sources import Part
from stages.data.tokenize import TextTokenizer, plain_ids
from stages.finetune_choices import Broken, DataSurvey
from stages.model.config_checks import of_text
from stages.model.declared import outline
from stages.model.files import is_gguf, is_local, read_config
from stages.model.gguf import quantization
from stages.model.hf import HfModel

MEASURED = 10_000
"""Rows that are tokenised at least, of as many; at most twice as many."""
MOST_CHARACTERS = 1 << 28
"""Characters of the rows that are kept to be tokenised."""
UNLIMITED = 1 << 30
QUESTION = 400
"""Most characters of a question that the model answers before and after training."""
CHARACTERS_A_TOKEN = 4
END = 1
"""Tokens after a document."""
FORMS: Mapping[str, str] = {
    "messages": "chat messages", "sharegpt": "ShareGPT conversations",
    "prompt/completion": "prompts and completions", "alpaca": "Alpaca instructions",
    "text": "text", "input_ids": "token ids",
}  # fmt: skip
NEED_TEMPLATE = ("messages", "sharegpt", "prompt/completion", "alpaca")


def _some(rows: Iterable[Row], forms: Counter[str]) -> tuple[list[Row], bool]:
    """Count the forms of rows; return as many of these as there is room for, and whether they are
    all. They are chosen at random but the same each time: rows that alternate would deceive an even
    choice."""
    kept, share, size, at_random = list[Row](), 1.0, 0, random.Random(0)
    with activity("reading rows", unit="rows") as doing:
        for row in rows:
            forms[row.form] += 1
            doing.advance(1)
            if at_random.random() >= share:
                continue
            kept.append(row)
            size += _characters(row.value)
            if len(kept) > 2 * MEASURED or size > MOST_CHARACTERS:
                chosen = [one for one in kept if at_random.random() < 0.5]
                kept = chosen or kept[-1:]  # a row of any size is better than none
                size = sum(_characters(one.value) for one in kept)
                share /= 2
    return kept, share == 1


def survey(ctx: Context, model: Mapping[str, Any], file: Path) -> DataSurvey:
    """Read all rows of a file, and lay out and tokenise all or, of many, some. Raises
    UsageError if none can be used, StageError for a file that cannot be read."""
    part = Part(file)
    source, why = _source(ctx, model)
    facts = _facts(ctx, model, source) | {"name": file.name, "guessed": why}
    if file.name.endswith(TEXT):  # plain text is one document
        documents = read_documents([part], text_key="text", unit="file")
        text = "".join(document.text for document in documents)
        length = len(text) // CHARACTERS_A_TOKEN
        if source is not None:
            share = text[: MOST_CHARACTERS // 64]
            ids = plain_ids(source.tokenizer(), [share])[0]
            length = len(ids) * len(text) // max(len(share), 1)
        return DataSurvey(form="plain text", rows=1, lengths=[length + END], running=True, **facts)
    mistakes, forms = Mistakes([part], "drop"), Counter[str]()
    found, all_kept = _some(rows_with_forms([part], None, Names(), mistakes), forms)
    rows, template, empty = mistakes.count, None, list[Row]()
    lengths, form = list[int](), max(forms, key=lambda one: forms[one], default="")
    if source is None:
        lengths = [_characters(row.value) // CHARACTERS_A_TOKEN + 8 for row in found]
    elif found:
        if form in NEED_TEMPLATE and not source.tokenizer().chat_template:
            template = "plain"
            source, _ = _source(ctx, {**model, "chat_template": template})
        assert source is not None
        lengths = list(_encoded(source, found, mistakes, empty))
    broken = tuple(
        Broken(what, count, f"{Path(first.file).name}:{first.row}")
        for what, count, first in mistakes.kinds()
    )
    if not lengths:
        raise UsageError(f"no row of {file} can be trained on: {broken[0].what}")
    first = min(empty, key=lambda row: row.number, default=None)
    short = (_prompt(row) for row in found if source)
    return DataSurvey(
        form=FORMS[form], rows=forms.total() + rows, lengths=sorted(lengths), broken=broken,
        all_read=all_kept and source is not None, running=form == "text", template=template,
        empty=None if first is None
        else Broken(EMPTY, len(empty), f"{Path(first.file).name}:{first.number}"),
        prompt=next(filter(None, short), None), **facts,
    )  # fmt: skip


def _source(ctx: Context, model: Mapping[str, Any]) -> tuple[ModelSource | None, str]:
    """The model without its weights, for its tokenizer; or why there is none."""
    try:
        source = HfModel(**{**model, "init": "random"}).run(ctx)
        source.tokenizer()
    except StageError as error:
        return None, str(error).splitlines()[0].partition(" (")[0]
    return source, ""


def _facts(ctx: Context, model: Mapping[str, Any], source: ModelSource | None) -> dict[str, Any]:
    """Parameters, positions and quantized weights of the model, as far as they are known."""
    asked, weights = HfModel(**model), ""
    try:
        config = read_config(asked)
        source = source or HfModel(config=config).run(ctx)
    except StageError:
        config = {}
    inner = of_text(config)
    positions, parameters = inner.get("max_position_embeddings"), None
    if source is not None:
        parameters = sum(one.numel() for one in outline(source).parameters())
    file = expanded(asked.path or "") / (asked.gguf_file or "")
    if is_local(asked.path or "") and asked.init != "random" and is_gguf(file.name):
        with contextlib.suppress(StageError):  # reported with the tokenizer
            weights = quantization(file)
    positions = positions if isinstance(positions, int) else None
    return {"positions": positions, "parameters": parameters, "weights": weights}


def _encoded(
    source: ModelSource, found: Sequence[Row], mistakes: Mistakes, empty: list[Row]
) -> Iterator[int]:
    """Yield the tokens of each row that can be laid out; `mistakes` gets the others, and `empty`
    those with an empty answer."""
    tokenizer = source.tokenizer()
    encoder = RowEncoder(
        fields=ChatFields(sequence_length=UNLIMITED), names=Names(),
        tokens=TextTokenizer(tokenizer), vocab_size=source.vocab_size,
        start=tokenize.start_ids(tokenizer, None),
        dtype=tokenize.id_dtype(tokenizer, source.vocab_size),
    )  # fmt: skip
    rest = iter(found)
    with activity("tokenising", total=len(found), unit="rows") as doing:
        while batch := list(itertools.islice(rest, 64)):
            for row, result in zip(batch, encoder.batch(batch), strict=True):
                if isinstance(result, Mistake):
                    mistakes.add(row.error(result.message, hint=result.hint))
                    continue
                if any(isinstance(one, Encoded) and EMPTY in one.notes for one in result):
                    empty.append(row)
                for one in result:
                    if isinstance(one, Encoded):
                        yield len(one.ids)
                    elif isinstance(one, Dropped):
                        mistakes.add(row.error(f"a row {one.why}"))
            doing.advance(len(batch))


def _prompt(row: Row) -> str | None:
    """The user's message that a row begins with, if it is short."""
    if row.form not in NEED_TEMPLATE:
        return None
    try:
        chat = read(row, template=True, names=Names(), vocab_size=1)
    except DataError:
        return None
    first = chat.messages[0] if isinstance(chat, Conversation) and chat.messages else {}
    text = first.get("content")
    if first.get("role") != "user" or not isinstance(text, str) or not 0 < len(text) <= QUESTION:
        return None
    return text if reads_back(text) else None


def _characters(value: Any) -> int:
    """Characters of all texts in a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    if isinstance(value, list):
        return sum(map(_characters, value))
    return 0
