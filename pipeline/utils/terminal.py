"""Text for people that cannot command their terminal and shows no environment variable's value.

All that a process writes to its standard output and error goes through a `RedactingStream` stream.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from pipeline.utils.foreign import parse_json

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tabs and line breaks
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # writing direction
    "\u2028\u2029\ud800-\udfff\U000e0000-\U000e007f]"  # line breaks, half pairs, invisible letters
)
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_NO_SECRET = re.compile(r"\d{1,7}|.{0,4}|[a-z]{5,7}", re.DOTALL)
"""Values that stay: short numbers, and words, which would hide half of what is said (`train`)."""
_NUMBERS = re.compile(r"[v+-]?\d+([.,:/ +-]{1,2}\d+|[eE][+-]?\d+)*")
"""One number, or several: versions, network addresses, dates, lists. They stay where the variable's
name does not say that it is secret."""
_NO_SECRET_IF_UNNAMED = re.compile(
    r"[A-Za-z][a-z]{4,11}|[A-Z]{5,12}"
    r"|(?!http)[a-z][a-z0-9+.-]*://[^\s?]+|https?://[^\s/?]+/?"
)
"""More of them where the variable's name does not say that it is secret: longer words; addresses of
buckets and servers, shown without user and password. A path on a web server may be a secret, as in
a webhook."""
LINE_OF_SECRET = 16
"""Characters of a line of a secret of several (a private key) that is hidden by itself."""
_USERINFO = re.compile(r"(?<=://)[^/@\s\"']+@")
"""User name and password in an address."""
_SIGNED = re.compile(
    r"([?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|sig|signature|token|"
    r"access_token|api_key|key)=)[^&\s\"'\\]+",
    re.IGNORECASE,
)
"""Signatures and keys among an address's parameters."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s,:\[\]{}"]+')
"""A string or another value without parts in JSON."""
_SECRET = re.compile(
    "TOKEN|SECRET|(?<!BY)(?<!COM)PASS|CREDENTIAL|AUTH(?!OR(?!I))|COOKIE|WEBHOOK|CONNECTION_?STRING|JWT|BEARER|"
    "PRIVATE|SIGNATURE|(?:API|ACCESS|ACCOUNT)_?KEY|_KEY$|KEY_ID$|"
    "(?:^|_)(?:PAT|PW|PIN|DSN|SAS)(?:_|$)|.PWD$",
    re.IGNORECASE,
)
_NO_SECRET_ALL_THE_SAME = {"OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY", "TOKENIZERS_PARALLELISM"}
"""Names that only look like it."""
_HARMLESS = (
    # the shell, the terminal, the user
    "_ HOME PWD OLDPWD USER LOGNAME USERNAME HOSTNAME HOST SHELL SHLVL TERM TERM_* COLORTERM "
    "COLUMNS LINES LS_COLORS NO_COLOR FORCE_COLOR CLICOLOR* PS1 PS2 EDITOR VISUAL PAGER LESS* "
    "DISPLAY WAYLAND_DISPLAY XDG_* SSH_AUTH_SOCK SSH_TTY SSH_CONNECTION SSH_CLIENT XAUTHORITY "
    "TMUX* STY OSTYPE HOSTTYPE MACHTYPE INVOCATION_ID JOURNAL_STREAM container DEBIAN_FRONTEND CI "
    # places
    "*PATH *DIR *_HOME *_ROOT *_PREFIX *_CACHE "
    # language and time
    "LANG LANGUAGE LC_* TZ "
    # Python, and what compiles
    "PYTHON* VIRTUAL_ENV* CONDA_* UV_CACHE_DIR CC CXX CPP LD_* CFLAGS CXXFLAGS CPPFLAGS LDFLAGS "
    "MAKEFLAGS MAX_JOBS NINJA_STATUS PYTEST_* HYPOTHESIS_* "
    # computing and communication
    "CUDA_* CUDNN_* CUBLAS_* NVIDIA_* NV_* NVTE_* NCCL_* RCCL_* ROCM_* ROCR_* HIP_* HSA_* "
    "MIOPEN_* GLOO_* UCX_* FI_* MKL_* OMP_* KMP_* GOMP_* OPENBLAS_* NUMEXPR_* VECLIB_* MALLOC_* "
    "TORCH* PYTORCH_* TRITON_* DS_* DEEPSPEED_* ACCELERATE_* FSDP_* TOKENIZERS_PARALLELISM "
    "TF_CPP_* TF_ENABLE_* TF_FORCE_* XLA_* RAYON_* "
    # launchers and schedulers
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
    "ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT PET_* PIPE_* PIPETRAIN_* SLURM_* SLURMD_* "
    "SRUN_* SBATCH_* OMPI_* OPAL_* PMI_* PMIX_* PMI2_* PRTE_* MPI_* MPIR_* MV2_* I_MPI_* HYDRA_* "
    "HYDI_* PBS_* LSB_* LSF_* SGE_* KUBERNETES_* SKYPILOT_* DSTACK_* "
    # names of hubs and trackers
    "HF_HUB_OFFLINE HF_HUB_ENABLE_* HF_HUB_DISABLE_* HF_HUB_VERBOSITY HF_DATASETS_OFFLINE "
    "HF_ENDPOINT TRANSFORMERS_OFFLINE TRANSFORMERS_VERBOSITY WANDB_PROJECT WANDB_ENTITY "
    "WANDB_NAME WANDB_MODE WANDB_RUN_ID WANDB_RUN_GROUP WANDB_SILENT MLFLOW_EXPERIMENT_NAME "
    "MLFLOW_RUN_NAME AWS_REGION AWS_DEFAULT_REGION AWS_PROFILE "
)
"""Names and patterns of names. What is neither here nor says that it is secret may be."""
_IS_HARMLESS = re.compile(
    "|".join(re.escape(name).replace(r"\*", ".*") for name in _HARMLESS.split())
)


def says_secret(name: str) -> bool:
    """Whether a variable's name says that its value is secret."""
    return _SECRET.search(name) is not None and name not in _NO_SECRET_ALL_THE_SAME


def is_harmless(name: str) -> bool:
    """Whether the value of a variable with this name can be shown to everybody."""
    return _IS_HARMLESS.fullmatch(name) is not None and not says_secret(name)


shows = ""
"""What shows the run of this process: `live`, `lines`, `quiet` (warnings and errors only) or
`json`, followed by `verbose` if debug messages are wanted too. Commands and ranks set it once, as
`terminal.shows`."""
_hidden: dict[str, str] = {}
"""Texts that are not shown, and what is shown instead."""
_guessed: dict[str, str] = {}
"""More of them, which nothing but a variable's being unknown speaks for."""
_typed: set[str] = set()
"""Texts that people have written themselves."""


def hide(value: str, name: str) -> None:
    """Show `name`, such as `$HF_TOKEN`, instead of `value`, in JSON and addresses too."""
    if says_secret(name.removeprefix("$")) or not _NUMBERS.fullmatch(value):
        _hidden.update(dict.fromkeys(_forms(value), name))


def _forms(value: str) -> Iterator[str]:
    lines = [line for line in value.splitlines()[:-1] if len(line) >= LINE_OF_SECRET]
    for part in (value, *lines, value.rpartition("\n")[2]):
        if not _NO_SECRET.fullmatch(part):
            yield from (part, json.dumps(part)[1:-1], quote(part, safe="", errors="replace"))


def typed(*texts: str) -> None:
    """Show what is in these texts, which people have written themselves (a command line, a recipe),
    unless a variable's name, or the recipe's `env`, says that it is secret."""
    _typed.update(texts)
    for form in [form for form in _guessed if any(form in text for text in texts)]:
        del _guessed[form]


def hide_secrets() -> None:
    """Hide the values of environment variables whose names say that they are secret."""
    for name, value in os.environ.items():
        if says_secret(name) and not _is_file_name(value):
            hide(value, f"${name}")


def hide_environment() -> None:
    """Hide the value of every environment variable that is not known to be harmless, in a process
    that records or shows a run: its folder is passed on. What people have typed stays."""
    hide_secrets()
    for name, value in os.environ.items():
        known = is_harmless(name) or _NO_SECRET_IF_UNNAMED.fullmatch(value)
        # the name of a file that could be made where it is, or a list of files that exist
        above = os.path.dirname(value.rstrip("/"))  # noqa: PTH120
        place = value.startswith("/") and above != "/" and os.path.isdir(above)  # noqa: PTH112
        place = place or all(map(_is_file_name, filter(None, value.split(os.pathsep))))
        if not (known or _NUMBERS.fullmatch(value) or _is_file_name(value) or place):
            _guessed.update(dict.fromkeys(_forms(value), f"${name}"))
    with contextlib.suppress(FileNotFoundError):
        typed(str(Path.cwd()))
    typed(*_typed, *sys.argv)


def _is_file_name(value: str) -> bool:
    # pathlib raises for a name that is too long, and for a user who has no home
    return os.path.exists(os.path.expanduser(value))  # noqa: PTH110, PTH111


def shown(text: str) -> str:
    """`text` as people may see it: colours are dropped, other commands are spelled out."""
    unsafe = UNSAFE.search(text) is not None
    text = _COLOUR.sub("", text) if unsafe else text  # first, since a secret may be coloured
    names = {**_guessed, **_hidden}
    if any(value in text for value in names):
        text = _without(names, text, in_json=text.lstrip().startswith(("{", "[")))
    text = _USERINFO.sub("***@", text) if "@" in text else text
    text = _SIGNED.sub(r"\1***", text) if "=" in text else text
    if unsafe:  # as JSON and YAML write letters, so that JSON stays JSON
        forms = "\\u{:04x}", "\\U{:08x}"
        text = UNSAFE.sub(lambda found: forms[ord(found[0]) >> 16 > 0].format(ord(found[0])), text)
    return text


def _without(names: Mapping[str, str], text: str, *, in_json: bool = False) -> str:
    """The text without these values. In JSON, or lines of JSON, they are replaced in strings, and
    as numbers: it stays JSON."""

    def shown_token(match: re.Match[str]) -> str:
        token = match[0]
        before = json.loads(token) if token.startswith('"') else token
        after = _without(names, before) if token.startswith('"') else names.get(token, token)
        return token if after == before else json.dumps(after)

    for parts in ([text], text.split("\n")) if in_json else ():
        with contextlib.suppress(ValueError):
            if all(parse_json(part) is not None for part in parts if part.strip()):
                return _TOKEN.sub(shown_token, text)
            break
    for value in sorted(names, key=len, reverse=True):
        text = text.replace(value, names[value])
    return text


def hidden_in(text: str) -> list[str]:
    """Names of the variables whose values the text holds."""
    return sorted({name for value, name in (_guessed | _hidden).items() if value in text})


@dataclass(eq=False, repr=False)
class RedactingStream:
    """A text stream that writes what may be shown. The carriage return that a progress bar begins
    with is let through."""

    stream: TextIO

    def write(self, text: str) -> int:
        bare = text.removeprefix("\r")
        self.stream.write(text[: len(text) - len(bare)] + shown(bare))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def hidden_variables() -> dict[str, list[int]]:
    """Variable of the environment -> the numbers of the forms of its value that this process hides;
    the others are `typed`."""
    names = {name.removeprefix("$") for name in (_guessed | _hidden).values()}
    forms = {name: [*_forms(os.environ.get(name, ""))] for name in sorted(names)}
    known = _guessed.keys() | _hidden.keys()
    return {name: [n for n, form in enumerate(own) if form in known] for name, own in forms.items()}


def redact_output(hidden: Mapping[str, Sequence[int]] | None = None) -> None:
    """Wrap this process's standard output and error in a `RedactingStream`, once, and hide the
    environment's secrets, or what the process that has started this one hides (`hidden_variables`).
    See `hide_environment` for processes of a run."""
    if hidden is None:
        hide_secrets()
    for name, numbers in (hidden or {}).items():
        forms = [*_forms(os.environ.get(name, ""))]
        _hidden.update({forms[number]: f"${name}" for number in numbers})
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, RedactingStream):
            setattr(sys, name, RedactingStream(stream))


def bare(stream: TextIO) -> TextIO:
    """The stream itself, for our own colours and bars of text that is `shown` already."""
    return stream.stream if isinstance(stream, RedactingStream) else stream


class ShownFormatter(logging.Formatter):
    """Records as people may see them."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))
