"""Errors, worded for the person who has to act on them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pydantic import ValidationError


COMMAND_LINE = "command line, "
"""Begins the place of what was given on the command line."""


@dataclass(frozen=True, kw_only=True, order=True)
class Location:
    """A place in a file a person wrote. `line` and `column` count from 1; 0: the whole file."""

    file: str
    line: int = 0
    column: int = 0

    @property
    def on_command_line(self) -> bool:
        """Whether this is not a file."""
        return self.file.startswith(COMMAND_LINE)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One mistake: where it is, what is wrong, what to do.

    A stage's `check` yields problems with `key` relative to its own fields (`files`, `group.lr`)
    and leaves `location` out; the plan fills in the slot and the place.
    """

    message: str
    key: str = ""
    hint: str = ""
    location: Location | None = None
    warning: bool = False
    """Whether the recipe can be run all the same."""

    def __str__(self) -> str:
        where = f"{self.location}: " if self.location else ""
        key = f"{self.key}: " if self.key else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{key}{self.message}{hint}"


Restart = Literal["never", "after progress", "always"]
"""When another start of a failed run may succeed; `after progress` if this one has
saved a checkpoint or finished a durable slot."""


class PipeError(Exception):
    """Base of every error a user can cause or can act on; shown without a traceback."""

    exit_code = 1
    restart: Restart = "never"
    prefix = "error: "
    """Precedes the message on the screen."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take other arguments than the text that they end up with.
        return Exception.__new__, (type(self), str(self)), vars(self)


class UsageError(PipeError):
    """The command or its arguments cannot be carried out as given."""

    exit_code = 2


class RecipeError(PipeError):
    """A recipe has mistakes; carries all of them, one line each."""

    exit_code = 2
    prefix = ""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class NoFit(PipeError):
    """The plan does not fit the hardware."""

    exit_code = 3


class PlanDrift(PipeError):
    """The run differs from the saved plan."""

    exit_code = 4


class PluginError(PipeError):
    """A stage plugin cannot be loaded or breaks the stage contract; names its distribution."""

    exit_code = 2


class StageError(PipeError):
    """A stage cannot do its work with what it found (a broken data file, a full disk)."""


class DataError(StageError):
    """A data file holds something that cannot be trained on; names the file and the row."""

    def __init__(
        self, message: str, *, file: str | Path, row: int | None = None, hint: str = ""
    ) -> None:
        self.message, self.file, self.row, self.hint = message, str(file), row, hint
        super().__init__(f"{file if row is None else f'{file}:{row}'}: {message}", hint=hint)


class BadRows(StageError):
    """Several rows cannot be trained on: the first of them, and the number of each kind."""

    def __init__(
        self, message: str, *, rows: Sequence[DataError], kinds: Mapping[str, int], hint: str = ""
    ) -> None:
        self.rows, self.kinds = tuple(rows), dict(kinds)
        super().__init__(message, hint=hint)


class EngineMismatch(StageError):
    """The live engine differs from the recipe."""


class CheckpointError(StageError):
    """A checkpoint is incomplete, damaged, or does not belong to this run."""


class WriterDied(CheckpointError):
    """The process that writes a rank's checkpoints was killed, or has crashed."""

    restart = "always"


class ResumeRefused(CheckpointError):
    """The recipe differs from the training whose checkpoint it would continue."""


class ExportError(StageError):
    """An export does not load as the model that was trained."""


Failure = Literal["raised", "stalled", "died"]
Memory = Literal["", "host", "device"]
"""Kind of memory that ran out."""


class RunFailed(PipeError):
    """A worker process failed; carries the first failing rank's error as its message."""

    folder: Path
    """The run's folder; on errors that `pipeline.run` and `pipeline.resume` raise."""

    def __init__(
        self,
        message: str,
        *,
        kind: Failure = "raised",
        restart: Restart = "never",
        memory: Memory = "",
    ) -> None:
        self.kind: Failure = kind
        self.restart = restart
        self.memory: Memory = memory
        self.stopping = False
        """Whether the run had been asked to stop, so that it is not started again."""
        super().__init__(message)


class RunStopped(PipeError):
    """A signal asked the run to end, and all that was done is kept: the same command continues. The
    exit code is EX_TEMPFAIL of sysexits.h."""

    folder: Path
    """The run's folder; on errors that `pipeline.run` and `pipeline.resume` raise."""
    exit_code = 75
    prefix = ""


class CommandStopped(PipeError):
    """A signal ended a command; the exit code is 128 plus the signal's number."""

    prefix = ""

    def __init__(self, signal_number: int, message: str) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(message)


class MachineUnfit(PipeError):
    """`pipe doctor` found something that makes training fail."""

    exit_code = 5


class RunLocked(UsageError):
    """Another live process works in this run folder."""


class JournalDamaged(UsageError):
    """A run's journal is damaged."""


_LATER_IT_MAY_GO = {
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    errno.ETIMEDOUT,
}  # fmt: skip
_OF_THE_MACHINE = _LATER_IT_MAY_GO | {
    errno.EFBIG, errno.EROFS, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ENOLCK,
    errno.EOPNOTSUPP,
}  # fmt: skip


def kind_of(error: OSError) -> type[PipeError]:
    """The error for a command that could not read or write: of the machine, such as a full disk,
    after which the same command can succeed, or of the command."""
    return StageError if error.errno in _LATER_IT_MAY_GO else UsageError


def is_user_error(error: BaseException) -> bool:
    """Whether a person can act on the error and needs no traceback: an error of this package, or
    one that only the machine can cause (a full disk), wherever it is raised."""
    machine = isinstance(error, OSError) and error.errno in _OF_THE_MACHINE
    return machine or isinstance(error, PipeError)


def in_words(error: BaseException) -> str:
    """Any error in one line."""
    if isinstance(error, PipeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        said = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        return f"{said}{_owner(error)}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _owner(error: OSError) -> str:
    """The owner of what is denied to this user, who can open it, as the end of a message."""
    if error.errno != errno.EACCES or not isinstance(error.filename, str):
        return ""
    for path in (Path(error.filename), *Path(error.filename).absolute().parents):
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.geteuid():
                how = "chgrp -R and chmod -R g+rX"
                return f" ({path} belongs to {path.owner()}, who can open it with {how})"
            return ""
    return ""


def first_validation_error(error: ValidationError) -> str:
    """The first problem of a file that pydantic has refused, after its dotted key."""
    first = error.errors(include_url=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


@contextlib.contextmanager
def system_errors_as(kind: type[PipeError]) -> Iterator[None]:
    """Raise an OSError of the body as an error of this kind; one of the machine, such as a full
    disk, is not a UsageError."""
    try:
        yield
    except OSError as error:
        raise (kind_of(error) if kind is UsageError else kind)(in_words(error)) from error
