"""Rows and conversations encoded as token ids, with the mask of those that are trained on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline import DataError, StageError
from stages.data import forms, tokenize
from stages.data.fields import ChatFields
from stages.data.forms import Completion, Example
from stages.data.messages import Conversation, Names, says_nothing
from stages.data.mistakes import Mistake
from stages.data.rendering import Refused, Renderer, layouts, prints_python
from stages.data.rows import Row, require_text
from stages.data.tokenize import Span, TextTokenizer, TextTokens
from stages.data.turns import THOUGHTS, Turns
from stages.model.assets import MARKERS

ENDED = "whose turns end with the token that begins the next message, since no other ends them"
LAID_OUT = "whose messages were given to the chat template in another form that says the same"
ENDLESS = "with turns that no special token ends, so that the model is not trained to stop"
EMPTY = "with an empty answer, which is trained as the end of a turn"
UNSHOWN = "with `tools` or `documents` that the chat template does not show"
UNRENDERED = "whose chat template leaves out part of what is said"
"""Notes on rows: they continue a sentence that begins with "rows"."""
EMPTY_ANSWER = "with an empty answer"
"""Why a row is dropped, as UNRENDERED."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Token ids and, for each, whether it is trained on (bool); shapes (length,)."""

    ids: NDArray[Any]
    trained: NDArray[np.bool_]
    long: bool = False
    """Whether the row was longer than a sample and has been truncated."""
    kept_more: bool = False
    """Whether earlier versions, which cut rows to one token more, had another sample."""
    nulls: str = ""
    """Place of a null that was removed, as in Row."""
    notes: tuple[str, ...] = ()
    """Things to report of the row. Each continues a sentence that begins with "rows"."""


@dataclass(eq=False)
class Dropped(Exception):
    """Leaves a row out."""

    why: str
    """Continues a sentence that begins with "rows"."""
    long: bool = False
    kept_more: bool = False
    """As in Encoded."""


@dataclass(frozen=True)
class _Text:
    """A text to be tokenised, and what makes a sample of its tokens."""

    text: str
    encode: Callable[[TextTokens], Encoded]


R = TypeVar("R")


def _tried(function: Callable[..., R], *args: Any) -> R | Dropped | Mistake:
    """Call a function, and return what it raises for a row, or what an earlier step raised for it,
    the last argument."""
    if isinstance(args[-1], Dropped | Mistake):
        return args[-1]
    try:
        return function(*args)
    except Dropped as dropped:
        return dropped
    except DataError as error:
        return Mistake(error.message, error.hint)


@dataclass(frozen=True, kw_only=True)
class RowEncoder:
    """Encodes rows by the fields of `data.chat`; a pure function of each row.

    The text of a conversation is rendered whole and tokenised whole. `Turns` finds the assistant's
    turns in it, from the end of the generation prompt to the end of the turn. White space that the
    template puts after the end-of-turn token is not trained on, since generation stops before it.
    A turn that nothing ends is ended by the token that begins the next message, as GLM's. A
    template with {% generation %} markers decides itself: the marked part of an assistant's
    message, with a header if that is marked, is trained on.
    """

    fields: ChatFields
    names: Names
    tokens: TextTokenizer
    vocab_size: int
    """Bound of the ids of pre-tokenised rows."""
    start: list[int]
    """Ids to put before a text; they are not trained on."""
    dtype: str
    """Type of the ids, which holds all of them."""

    @functools.cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.tokens.tokenizer, self.fields.today)

    def batch(self, rows: Sequence[Row]) -> list[list[Encoded | Dropped] | Mistake]:
        """Encode rows in order, with one call of the tokenizer, each as a sample or as several; a
        Mistake stands for each that cannot be used."""
        examples = list[Sequence[Example | Dropped | Mistake]]()
        for row in rows:
            example = _tried(self._example, row)
            if self.fields.turns == "each" and isinstance(example, Conversation):
                each = [  # up to a turn, the only one that is trained on
                    dataclasses.replace(
                        example, messages=example.messages[: turn + 1],
                        first=min(example.first, turn), silent=frozenset(range(turn)),
                    )
                    for turn in self._trained_turns(example)
                ]  # fmt: skip
                examples.append(each or [example])
            else:
                examples.append([example])
        flat = [*itertools.chain.from_iterable(examples)]
        if self.tokens.tokenizer.chat_template:
            chats = [each for each in flat if isinstance(each, Conversation)]
            self._renderer.ahead(chats, self._located)
        laid_out = [_tried(self._laid_out, each) for each in flat]
        texts = [each.text for each in laid_out if isinstance(each, _Text)]
        found = iter(self.tokens(texts))
        encoded = (
            _tried(each.encode, next(found)) if isinstance(each, _Text) else each
            for each in laid_out
        )
        results = list[list[Encoded | Dropped] | Mistake]()
        for row, own in zip(rows, examples, strict=True):
            made = itertools.islice(encoded, len(own))
            samples = [_tried(self._cut, row, each) for each in made]
            mistakes = [each for each in samples if isinstance(each, Mistake)]
            kept = [each for each in samples if not isinstance(each, Mistake)]
            results.append(mistakes[0] if mistakes else kept)
        return results

    def _example(self, row: Row) -> Example:
        example = forms.read(
            row, template=self.fields.template, names=self.names, vocab_size=self.vocab_size
        )
        if isinstance(example, forms.Tokens):
            return example
        if isinstance(example, Conversation) and self.fields.empty != "train":
            turns = self._trained_turns(example)
            empty = [index for index in turns if says_nothing(example.messages[index])]
            if empty and self.fields.empty == "drop":
                raise Dropped(EMPTY_ANSWER)
            if empty:
                raise row.error(
                    f"messages[{empty[0]}] is an answer that says nothing",
                    hint="set `empty: drop` to leave such rows out, or `train` to train on the end "
                    "of the turn",
                )
        own: list[Any] = (
            [*example.messages, example.extra]
            if isinstance(example, Conversation)
            else [example.prompt, example.completion]
        )
        treatment = self.fields.special_tokens
        spelled = None if treatment == "allow" else self.tokens.spelled_in(own)
        if spelled is not None and treatment == "drop":
            raise Dropped("whose text spells a special token")
        if spelled is not None:
            raise row.error(
                f"its text spells the special token {spelled!r}",
                hint="set `special_tokens: drop` to leave such rows out, or `allow` where the "
                "text is meant to hold it",
            )
        return example

    def _laid_out(self, given: Example) -> _Text | Encoded:
        if isinstance(given, Conversation):
            return self._conversation(given)
        if isinstance(given, Completion):
            encode = functools.partial(self._completed, given)
            return _Text(given.prompt + given.completion, encode)
        trained = np.array(given.trained, bool)
        return Encoded(ids=np.array(given.ids, np.int64), trained=trained)

    def _completed(self, example: Completion, text: TextTokens) -> Encoded:
        """Return a text with its start and end token, which it may have already."""
        start = 0 if self.fields.loss == "all" else len(example.prompt)
        trained = text.inside([(start, len(example.prompt) + len(example.completion))])
        tokenizer = self.tokens.tokenizer
        if tokenizer.eos_token_id is None:
            raise StageError("the tokenizer has no eos_token to end a completion with")
        begun = bool(self.start) and text.ids[: len(self.start)].tolist() == self.start
        ended = example.completion.rstrip().endswith(tokenizer.eos_token)
        before = [] if begun else self.start
        after = [] if ended else [tokenizer.eos_token_id]
        return Encoded(
            ids=np.concatenate([before, text.ids, after]).astype(np.int64),
            trained=np.concatenate([[False] * len(before), trained, [True] * len(after)]) > 0,
            notes=(tokenize.FORMATTED,) if ended or begun else (),
        )

    def _cut(self, row: Row, encoded: Encoded) -> Encoded:
        """Return at most `sequence_length` tokens. Raises Dropped if none is trained on."""
        room, treatment = self.fields.sequence_length, self.fields.too_long
        ids, trained = encoded.ids, encoded.trained
        if not trained[1:].any():  # nothing predicts the first token
            raise Dropped("without a token to train on")
        if len(ids) <= room:
            return dataclasses.replace(encoded, ids=ids.astype(self.dtype))
        if treatment == "error":
            raise row.error(f"{len(ids)} tokens, but `sequence_length` is {room}")
        one_more = len(ids) == room + 1
        if treatment == "drop":
            raise Dropped("longer than `sequence_length`", long=True, kept_more=one_more)
        one_more |= bool(trained[1 : room + 1].any())
        if not trained[1:room].any():
            why = "whose trained tokens all come after `sequence_length`"
            raise Dropped(why, long=True, kept_more=one_more)
        ids, trained = ids[:room].astype(self.dtype), trained[:room]
        return dataclasses.replace(encoded, ids=ids, trained=trained, long=True, kept_more=one_more)

    def _conversation(self, chat: Conversation) -> _Text:
        """Return a conversation in the first form that the template renders without leaving out
        anything that is said. Raises DataError if there is none, but under `unrendered: allow`."""
        template, trained = self._renderer.template(chat), self._trained_turns(chat)
        unshown = any(chat.extra.get(key) and key not in template for key in ("tools", "documents"))
        best: tuple[Turns, list[tuple[int, str]]] | None = None
        refused = list[Refused]()
        for messages in layouts(chat.messages):
            same = messages is chat.messages
            form = chat if same else dataclasses.replace(chat, messages=messages)
            try:
                text = self._renderer.text(form, len(messages))
            except Refused as error:
                refused.append(error)
                continue
            turns = Turns(self._renderer, form, text, self.tokens.spelled)
            lost = turns.lost(trained)
            if prints_python(messages, text):
                lost.append((-1, "the JSON of arguments, which it prints as Python does"))
            if best is None or len(lost) < len(best[1]):
                require_text(chat.row, text, "the text of the conversation")
                best = turns, lost
            if not lost:
                break
        if best is None:
            raise self._renderer.explained(chat, *refused)
        turns, lost = best
        if lost and self.fields.unrendered == "drop":
            raise Dropped(UNRENDERED)
        if lost and self.fields.unrendered == "error":
            index, said = lost[0]
            where = f" of messages[{index}]" if index >= 0 else ""
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            hint = "name a template that lays it out in `model.chat_template`"
            if said == THOUGHTS and (len(chat.messages) - 1, THOUGHTS) not in lost:
                hint = "set `turns: each` or `loss: last`, which train a turn as it is at inference"
            raise chat.row.error(
                f"the chat template leaves out {said}{where}{more}",
                hint=f"{hint}, or set `unrendered: allow` to train on what is left",
            )
        facts = {LAID_OUT: turns.chat is not chat, UNSHOWN: unshown, UNRENDERED: bool(lost)}
        notes = tuple(note for note, is_so in facts.items() if is_so)
        return _Text(turns.text, functools.partial(self._encoded, turns, notes))

    def _trained_turns(self, chat: Conversation) -> list[int]:
        """Return the indices of the messages that are trained on."""
        first = 0 if self.fields.loss in ("assistant", "all") else chat.first
        turns = [index for index in chat.assistant_turns() if index >= first]
        turns = turns[-1:] if self.fields.loss == "last" else turns
        return [index for index in turns if index not in chat.silent]

    def _located(self, chat: Conversation) -> list[tuple[int, bool]]:
        """Return the messages whose characters are looked for, and whether to look after their
        generation prompt: those not to train on if all else is trained on, or those to train on."""
        assistant = chat.assistant_turns()
        if self.fields.loss == "all":
            return [(index, 0 < index in assistant) for index in sorted(chat.silent)]
        prompt = not MARKERS.search(self._renderer.template(chat))
        return [(index, prompt) for index in self._trained_turns(chat)]

    def _encoded(self, turns: Turns, notes: tuple[str, ...], tokens: TextTokens) -> Encoded:
        """Return the tokens of a text with their mask, and ids that are trained on after it. Raises
        DataError if its turns cannot be located."""
        chat, tokenizer, end = turns.chat, self.tokens.tokenizer, list[int]()
        located = self._located(chat)
        indices = [index for index, _ in located]
        if self.fields.loss != "all" and any(says_nothing(chat.messages[n]) for n in indices):
            notes += (EMPTY,)
        if self.fields.loss == "all":
            silent = [turns.span(index, prompt=prompt) for index, prompt in located]
            trained = ~tokens.inside(silent)
        elif MARKERS.search(self._renderer.template(chat)):
            trained = self._marked(turns, tokens, indices)
        else:
            spans = list[Span]()
            special = tokens.bounds[np.isin(tokens.ids, self.tokens.special_ids)]
            for index, prompt in located:
                start, stop = turns.span(index, prompt=prompt)
                within = special[(special[:, 0] < stop) & (special[:, 1] > start)]
                after = int(within[-1, 1]) if len(within) else stop
                # White space after the last special token is not trained on.
                stop = stop if turns.text[after:stop].strip() else after
                if not (special[:, 1] == stop).any():
                    # The model says the token that begins the next message to end its turn, where
                    # nothing else does.
                    begins = self.tokens.spelled.match(turns.text[stop:] or turns.after())
                    known = begins if begins and begins.group() != tokenizer.bos_token else None
                    notes += (ENDED if known else ENDLESS,)
                    if known and stop < len(turns.text):
                        stop += known.end()
                    elif known:
                        end = [tokenizer.convert_tokens_to_ids(known.group())]
                spans.append((start, stop))
            trained = tokens.inside(spans)
        if not chat.assistant_turns() and not trained.any():
            raise Dropped("without a message of the assistant")
        return Encoded(
            ids=np.concatenate([tokens.ids, np.array(end, np.int64)]),
            trained=np.concatenate([trained, np.ones(len(end), bool)]),
            nulls=chat.row.nulls,
            notes=notes,
        )

    def _marked(self, located: Turns, tokens: TextTokens, turns: list[int]) -> NDArray[np.bool_]:
        """Return the template's own mask, limited to `turns` unless they are all the assistant's.
        Raises DataError if the markers miss one of them."""
        chat = located.chat
        encoded = self._renderer.apply(
            chat,
            chat.messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        marked = np.array(encoded["assistant_masks"], dtype=bool)
        everything = turns == chat.assistant_turns()
        try:
            spans = [located.span(index, prompt=False) for index in turns]
        except DataError:
            if everything and marked.any():
                return marked  # turns that are rendered differently here cannot be compared
            raise
        for index, span in zip(turns, spans, strict=True):
            found = (marked & tokens.inside([span])).any()
            if not found and not says_nothing(chat.messages[index]):
                raise chat.row.error(
                    "the chat template's {% generation %} markers do not mark the assistant's "
                    "turns",
                    hint="correct the template, or remove the markers",
                )
        return marked if everything else marked & tokens.inside(spans)
