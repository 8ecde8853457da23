"""Generated text: sentences of a novel, some of whose words are numbers or made up."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

NOVEL = Path(__file__).parents[2] / "recipes" / "data" / "persuasion.txt"
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


class Writer:
    """Writes text of any length, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._words = NOVEL.read_text("utf-8").split()

    def text(self, length: int) -> str:
        """Return at least `length` characters, in paragraphs."""
        found, size = list[str](), 0
        while size < length:
            sentence = self._sentence() + ("\n\n" if self._random.random() < 0.2 else " ")
            found.append(sentence)
            size += len(sentence)
        return "".join(found).strip()

    def documents(self, size: int) -> Iterator[str]:
        """Yield documents of some 4,500 characters until they have `size` bytes."""
        while size > 0:
            text = self.text(int(self._random.lognormvariate(8, 0.9)))
            size -= len(text.encode())
            yield text

    def conversations(self, size: int) -> Iterator[list[dict[str, str]]]:
        """Yield conversations of one to four questions and answers until these have `size`
        bytes."""
        while size > 0:
            turns = 2 * self._random.randint(1, 4)
            roles = itertools.islice(itertools.cycle(("user", "assistant")), turns)
            messages = [{"role": role, "content": self._turn(role)} for role in roles]
            size -= sum(len(each["content"].encode()) for each in messages)
            yield messages

    def _turn(self, role: str) -> str:
        return self.text(self._random.randint(40, 400 if role == "user" else 1500))

    def _sentence(self) -> str:
        count = self._random.randint(8, 40)
        start = self._random.randrange(len(self._words) - count)
        words = self._words[start : start + count]
        for place in self._random.sample(range(count), 2):
            kind = self._random.random()
            if kind < 0.1:
                words[place] = str(self._random.randrange(100_000))
            elif kind < 0.3:
                letters = self._random.choices(LETTERS, k=self._random.randint(4, 12))
                words[place] = "".join(letters)
        return " ".join(words)


def write(folder: Path, *, text: int, chat: int) -> dict[str, Path]:
    """Write files of about `text` and `chat` bytes; return them by their case's name."""
    files = {
        "documents": folder / "documents.jsonl",
        "one file": folder / "text.txt",
        "chat": folder / "chat.jsonl",
    }
    documents = list(Writer(0).documents(text))
    _lines(files["documents"], [{"text": document} for document in documents])
    files["one file"].write_text("\n".join(documents), "utf-8")
    _lines(files["chat"], [{"messages": each} for each in Writer(1).conversations(chat)])
    return files


def _lines(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
