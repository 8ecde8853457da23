"""accelerate's, DeepSpeed's and transformers' files, which together say one training."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.importing.files import read_config
from pipeline.importing.translator import ConfigFile, Request, Translation, Translator
from stages.importing.accelerate import ACCELERATE_ALL, FSDP_PREFIXED
from stages.importing.account import Account, tool
from stages.importing.deepspeed import DEEPSPEED, assume_engine
from stages.importing.recipe import compose, recipe
from stages.importing.rules import Table, Verdict
from stages.importing.trainer import DEFAULTS
from stages.importing.trainer_other import SFT_DEFAULTS, SFT_KEYS, TRAINER_ALL

ACCELERATE_KIND = "accelerate config"
DEEPSPEED_KIND = "DeepSpeed configuration"
TRAINER_KIND = "transformers TrainingArguments"
TABLES: Mapping[str, Table] = {
    TRAINER_KIND: TRAINER_ALL,
    ACCELERATE_KIND: ACCELERATE_ALL,
    DEEPSPEED_KIND: DEEPSPEED,
}
"""In the order in which files are read: `auto` looks back."""

BLOCKS = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
}
"""accelerate's blocks -> the distributed_type that reads them. The others always count."""


class HuggingFace(Translator):
    """`accelerate config` files, DeepSpeed JSON and TrainingArguments, alone or together."""

    name = "hugging_face"

    def kind(self, content: Mapping[str, Any]) -> str | None:
        if tool(content) is not None:
            return None
        known = {kind: _known(content, table) for kind, table in TABLES.items()}
        best = max(known, key=lambda kind: known[kind])
        return best if known[best] and 2 * known[best] >= len(content) else None

    def foreign(self, content: Mapping[str, Any]) -> str | None:
        return tool(content)

    def translate(self, files: Sequence[ConfigFile], request: Request) -> Translation:
        account = Account()
        reading = _Reading(account, files)
        for kind in TABLES:
            for file in files:
                if self.kind(file.content) == kind:
                    reading.take(file, kind)
        if DEEPSPEED_KIND in reading.kinds:
            assume_engine(account, alone=TRAINER_KIND not in reading.kinds)
        draft = compose(account, request, files[0].path.stem)
        fates = account.fates()
        blocked = any(fate.blocks for fate in fates)
        return Translation(
            recipe=None if blocked else recipe(draft),
            notes=draft.notes,
            missing={} if blocked else draft.missing,
            fates=fates,
        )


class _Reading:
    """Takes files, and those that they name, into the account."""

    def __init__(self, account: Account, files: Sequence[ConfigFile]) -> None:
        self._account = account
        self._others = {file.path.name: file for file in files}
        self.kinds: set[str] = set()

    def take(self, file: ConfigFile, kind: str) -> None:
        """One file of a known kind."""
        self.kinds.add(kind)
        take: dict[str, Callable[[ConfigFile], None]] = {
            ACCELERATE_KIND: self._accelerate,
            TRAINER_KIND: self._trainer,
            DEEPSPEED_KIND: lambda file: self._deepspeed(file.path.name, file.content),
        }
        take[kind](file)

    def _deepspeed(self, name: str, content: Mapping[str, Any], prefix: str = "") -> None:
        self.kinds.add(DEEPSPEED_KIND)
        self._account.read(name, content, DEEPSPEED, prefix)

    def _accelerate(self, file: ConfigFile) -> None:
        kind = str(file.content.get("distributed_type", "NO")).upper()
        for key, value in file.content.items():
            reader = BLOCKS.get(key)
            if isinstance(value, Mapping) and value and reader not in (None, kind):
                why = f"is not read: distributed_type is {kind}"
                self._account.dismiss_all(file.path.name, value, f"{key}.", why)
            else:
                self._account.read(file.path.name, {key: value}, ACCELERATE_ALL)
        block = file.content.get("deepspeed_config")
        named = block.get("deepspeed_config_file") if isinstance(block, Mapping) else None
        if kind == "DEEPSPEED" and named not in (None, "none"):
            self._named(file, "deepspeed_config.deepspeed_config_file", named)

    def _trainer(self, file: ConfigFile) -> None:
        content = dict(file.content)
        sharding = content.pop("fsdp_config", None)
        self._account.read(file.path.name, content, TRAINER_ALL)
        if isinstance(sharding, str):
            read = Verdict(outcome="default", why="is read as a file of its own")
            self._account.enter(file.path.name, "fsdp_config", sharding, read)
            self._named(file, "fsdp_config", sharding, file.content.get("fsdp"))
        elif isinstance(sharding, Mapping):
            self._fsdp(file.path.name, sharding, "fsdp_config.", file.content.get("fsdp"))
        engine = content.get("deepspeed")
        if isinstance(engine, Mapping):
            self._deepspeed(file.path.name, engine, "deepspeed.")
        elif engine:
            self._named(file, "deepspeed", engine)
        if SFT_KEYS & content.keys():
            said = {key for key, value in content.items() if value is not None}
            said |= {"bf16"} if content.get("fp16") else set()
            for key, (fact, value) in SFT_DEFAULTS.items():
                if key not in said:
                    self._account.assume(fact, value, "TRL's default")
        for fact, value in DEFAULTS.items():
            self._account.assume(fact, value, "transformers' default")
        self._account.assume("keep", None, "transformers keeps all")

    def _fsdp(self, name: str, content: Mapping[str, Any], prefix: str, wanted: Any) -> None:
        if wanted:
            self._account.read(name, content, FSDP_PREFIXED, prefix)
        else:
            self._account.dismiss_all(name, content, prefix, "is not read: fsdp is not set")

    def _named(self, file: ConfigFile, key: str, name: Any, wanted: Any = True) -> None:
        """A file that `key` names. One that was given itself is read anyway."""
        if Path(str(name)).name in self._others:
            return
        found = next((path for path in _places(file, str(name)) if path.is_file()), None)
        if found is None:
            self._account.reconsider(
                file.path.name,
                key,
                Verdict(
                    outcome="refused",
                    why="there is no such file",
                    hint=f"name it too: pipe import {file.path} FILE",
                    blocks=True,
                ),
            )
        elif key == "fsdp_config":
            self._fsdp(found.name, read_config(found).content, "", wanted)
        else:
            self._deepspeed(found.name, read_config(found).content)


def _places(file: ConfigFile, name: str) -> Sequence[Path]:
    """Relative to here, as the tools have it, else to the file that names it."""
    path = Path(name).expanduser()
    return (path, file.path.parent / os.path.relpath(path))


def _known(content: Mapping[str, Any], table: Table) -> int:
    """How many keys could be of that table: blocks where it has blocks, values elsewhere."""
    return sum(
        key in table and (isinstance(value, Mapping) != callable(table[key]) or not value)
        for key, value in content.items()
    )
