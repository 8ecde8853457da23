"""Make the table of docs/dev/chat-templates.md: `python docs/chat_templates.py`.

Encodes twelve kinds of chat with each chat template that TRL ships (Apache-2.0; `trl` of the `dev`
extra), and compares what is trained on with the mask of TRL's training template, if there is one.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline import DataError
from stages.data.encode import Encoded, RowEncoder
from stages.data.messages import Names
from stages.data.mistakes import Mistake
from stages.data.rows import Row
from stages.data.stages import ChatData
from stages.data.tokenize import TextTokenizer

PAGE = Path(__file__).parent / "dev/chat-templates.md"
BEGIN, END = "<!-- chat templates -->\n", "<!-- end of chat templates -->\n"
_SPECIAL = re.compile(
    r"<[|｜][^<>\s{}]*?[|｜]>|<(?:start|end)_of_turn>|<end_of_utterance>|<(?:tool_)?\w+\|>"
)
_NO_THOUGHTS = re.compile(r"^<think>\s*</think>\s*")


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _thinks(content: str, thoughts: str, **more: Any) -> dict[str, Any]:
    return _assistant(content, reasoning_content=thoughts, **more)


def _call(town: str) -> dict[str, Any]:
    return {
        "type": "function", "id": "call_0001",
        "function": {"name": "forecast", "arguments": {"town": town}},
    }  # fmt: skip


_SYSTEM = {"role": "system", "content": "Be brief."}
_HOW, _MILD = _user("How warm?"), _assistant("It is mild.")
_WET, _RAIN = _user("And wet?"), _assistant("A little rain.")
_CALLS = _assistant("", tool_calls=[_call("Oslo")])
_ANSWER = {
    "role": "tool", "name": "forecast", "tool_call_id": "call_0001", "content": "12 degrees",
}  # fmt: skip
_TOOL = {
    "type": "function",
    "function": {
        "name": "forecast", "description": "The weather of a town.",
        "parameters": {
            "type": "object", "required": ["town"],
            "properties": {"town": {"type": "string", "description": "Name"}},
        },
    },
}  # fmt: skip
CHATS: dict[str, Sequence[dict[str, Any]]] = {
    "one turn": [_HOW, _MILD],
    "a system message": [_SYSTEM, _HOW, _MILD],
    "two turns": [_HOW, _MILD, _WET, _RAIN],
    "three turns": [_SYSTEM, _HOW, _MILD, _WET, _RAIN, _user("Wind?"), _assistant("None.")],
    "thoughts": [_HOW, _thinks("It is mild.", "I look outside.")],
    "thoughts within the content": [
        _HOW, _assistant("<think>\nI look outside.\n</think>\n\nIt is mild."),
    ],
    "thoughts in two turns": [
        _HOW, _thinks("It is mild.", "I look outside."), _WET, _thinks("A little rain.", "I feel."),
    ],
    "a call": [_HOW, _CALLS],
    "a call without a content": [_HOW, {"role": "assistant", "tool_calls": [_call("Oslo")]}],
    "a content and two calls": [
        _HOW, _assistant("I look it up.", tool_calls=[_call("Oslo"), _call("Rome")]),
    ],
    "a call, its result, an answer": [_HOW, _CALLS, _ANSWER, _MILD],
    "the same with thoughts, and another turn": [
        _SYSTEM, _HOW, _thinks("", "I look it up.", tool_calls=[_call("Oslo")]), _ANSWER,
        _thinks("It is mild.", "12 is mild."), _WET, _thinks("A little rain.", "I feel."),
    ],
}  # fmt: skip


def templates() -> dict[str, tuple[str, str | None]]:
    """Return TRL's templates with their training templates, by name."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("this needs trl: pip install -c constraints.txt -e '.[dev]'")
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    texts = {file.stem: file.read_text("utf-8") for file in sorted(folder.glob("*.jinja"))}
    plain = [name for name in texts if not name.endswith("_training")]
    return {name: (texts[name], texts.get(f"{name}_training")) for name in plain}


def tokenizer(template: str) -> Any:
    """Return a tokenizer of bytes that has a template and the special tokens that it writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template, bos_token="<BOS>", eos_token="<EOS>"
    )
    fast.add_special_tokens({"additional_special_tokens": sorted(set(_SPECIAL.findall(template)))})
    return fast


def trained(fast: Any, messages: Sequence[dict[str, Any]], **fields: Any) -> list[list[str]]:
    """Return the texts that are trained on in each sample of a chat. Raises DataError if it is
    refused."""
    row: dict[str, Any] = {"messages": list(messages)}
    if any(message.get("tool_calls") for message in messages):
        row["tools"] = [_TOOL]
    stage = ChatData(
        files="unused", loss="assistant", special_tokens="allow", sequence_length=1 << 20, **fields
    )
    encoder = RowEncoder(
        fields=stage, names=Names(), tokens=TextTokenizer(fast), vocab_size=1 << 20, start=[],
        dtype="<u4",
    )  # fmt: skip
    (samples,) = encoder.batch([Row(file="chat", number=1, value=row, form="messages")])
    if isinstance(samples, Mistake):
        raise DataError(samples.message, file="chat", hint=samples.hint)
    kept = [each for each in samples if isinstance(each, Encoded)]
    return [list(_runs(fast, each.ids.tolist(), each.trained.tolist())) for each in kept]


def marked(fast: Any, messages: Sequence[dict[str, Any]]) -> list[str]:
    """Return the texts that a training template marks."""
    calls = any(message.get("tool_calls") for message in messages)
    encoded = fast.apply_chat_template(
        list(messages), tools=[_TOOL] if calls else None, return_dict=True,
        return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False},
    )  # fmt: skip
    return list(_runs(fast, encoded["input_ids"], encoded["assistant_masks"]))


def _runs(fast: Any, ids: Sequence[int], mask: Sequence[Any]) -> Iterator[str]:
    run: list[int] = []
    for token, included in zip([*ids, 0], [*mask, 0], strict=True):
        if included:
            run.append(token)
        elif run:
            yield fast.decode(run)
            run = []


def outcome(plain: Any, training: Any | None, messages: Sequence[dict[str, Any]]) -> str:
    """Return the sign of what becomes of a chat: see `LEGEND`."""
    try:
        (ours,) = trained(plain, messages)
    except DataError as error:
        if "leaves out" not in str(error):
            return "!"
        try:
            trained(plain, messages, turns="each")
        except DataError:
            return "x"
        return "e"
    if training is None:
        return "+"
    theirs = _marked_in_any_form(training, messages)
    prompt = plain.apply_chat_template([_HOW], tokenize=False, add_generation_prompt=True)
    if len(ours) == len(theirs):
        pairs = list(zip(ours, theirs, strict=True))
        if all(_same(our, their, prompt) for our, their in pairs):
            return "="
        if all(_same(our, _NO_THOUGHTS.sub("", their), prompt) or _same(our, their, prompt)
               for our, their in pairs):  # fmt: skip
            return "r"
    return "d"


def _marked_in_any_form(training: Any, messages: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a training template marks of messages, given as text or as parts: those of models
    with pictures lose a content that is a text, or refuse it."""
    parts = [{**m, "content": [{"type": "text", "text": m.get("content", "")}]} for m in messages]
    answers = [str(m.get("content", "")) for m in messages if m["role"] == "assistant"]
    said = [answer.rpartition("</think>")[2].strip() for answer in answers]
    for form in (messages, parts):
        try:
            found = marked(training, form)
        except Exception:  # a template may raise anything
            continue
        if all(text in "".join(found) for text in said):
            return found
    return []


def _same(ours: str, theirs: str, prompt: str) -> bool:
    """Whether two texts are the same, but for white space at the end, and for a part of the
    generation prompt at the beginning, which some training templates mark too."""
    ours, theirs = ours.rstrip(), theirs.rstrip()
    more = theirs.removesuffix(ours)
    return theirs.endswith(ours) and more in prompt


LEGEND = {
    "=": "trained, with the mask of TRL's training template (white space after the end of a turn, "
    "and headers that some of those mark, aside)",
    "+": "trained; TRL has no training template for it",
    "r": "trained; the training template renders empty thoughts in earlier turns, which the "
    "model's own leaves out",
    "d": "trained; the training template does not mark the token that begins a tool's response and "
    "ends the call, or marks also the beginning of a thought that the generation prompt opens",
    "e": "an error: the template leaves out thoughts of earlier turns; `turns: each` trains them",
    "x": "an error that says what the template leaves out: thoughts, calls or their arguments",
    "!": "the template refuses it: no system message, a single call, roles that must alternate",
}


def table() -> str:
    """Return the table and its legend as Markdown."""
    lines = [f"{number}. {name}" for number, name in enumerate(CHATS, 1)]
    heads = [str(number) for number in range(1, len(CHATS) + 1)]
    lines += ["", f"| | {' | '.join(heads)} |", "|" + "---|" * (len(CHATS) + 1)]
    lines += [row(name, *texts) for name, texts in templates().items()]
    lines += ["", *(f"- `{sign}` {words}" for sign, words in LEGEND.items())]
    return "\n".join(lines) + "\n"


def row(name: str, text: str, training: str | None) -> str:
    """Return the row of a template in the table."""
    plain = tokenizer(text)
    other = tokenizer(training) if training else None
    signs = [outcome(plain, other, chat) for chat in CHATS.values()]
    return f"| {name} | {' | '.join(signs)} |"


def written(page: str, content: str) -> str:
    """Return a page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + content + END + rest.partition(END)[2]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    PAGE.write_text(written(PAGE.read_text("utf-8"), table()), "utf-8")
