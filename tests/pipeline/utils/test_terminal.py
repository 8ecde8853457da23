"""Output cannot control a terminal, and contains no environment variable's value."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.execution import failures
from pipeline.execution.rank_logging import rank_log
from pipeline.recipe import read_recipe
from pipeline.recipe.dump import render
from pipeline.utils import terminal
from pipeline.utils.terminal import UNSAFE, RedactingStream, is_harmless, says_secret

EVIL = "\x1b]0;title\x07 \x1b]8;;http://x\x1b\\link \u202eabc \x9b31m \rover \x7f \udcff"
HARMLESS = (
    "\\u001b]0;title\\u0007 \\u001b]8;;http://x\\u001b\\link "
    "\\u202eabc \\u009b31m \\u000dover \\u007f \\udcff"
)


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, nothing in {"_hidden": {}, "_guessed": {}, "_typed": set()}.items():
        monkeypatch.setattr(terminal, name, nothing)


def test_commands_are_spelled_out() -> None:
    assert terminal.shown(EVIL) == HARMLESS
    assert terminal.shown("line\n\ttab, é, 👩‍👩‍👧, \u00a0") == "line\n\ttab, é, 👩‍👩‍👧, \u00a0"
    assert terminal.shown("\x1b[1;31mred\x1b[0m") == "red"
    assert terminal.shown("\x1b[\x1b[31m31mred") == "\\u001b[31mred"
    assert json.loads(terminal.shown(json.dumps({EVIL: "\x7f"}))) == {EVIL: "\x7f"}


def test_a_bar_may_go_back_to_the_start_of_its_line() -> None:
    stream = io.StringIO()
    RedactingStream(stream).write("\r 3%\r\n")
    assert stream.getvalue() == "\r 3%\\u000d\n"


def test_recipes_stay_what_they_are() -> None:
    values = {"name": EVIL[:-1], "é": ["\u202e", "é"]}
    text = render(values)
    assert UNSAFE.search(text) is None
    assert yaml.safe_load(text) == values


@pytest.mark.parametrize(
    "command",
    [
        ("check", "r.yaml"), ("check", "r.yaml", f"seed={EVIL[:-1]}"), ("run", EVIL),
        ("resume", EVIL), ("ls", EVIL), ("inspect", EVIL), ("import", EVIL), ("stages", EVIL),
        ("convert", EVIL, "to", "--to", "canonical"), ("convert", EVIL, "to", "--to", EVIL),
        ("stages", "--procs", EVIL),
    ],
)  # fmt: skip
def test_no_message_commands_the_terminal(pipe: Callable[..., Result], command: tuple[str]) -> None:
    Path("r.yaml").write_text(f'name: "{json.dumps(EVIL)[1:-7]}"\nstages: {{}}\n', "utf-8")
    result = pipe(*command)
    assert result.exit_code == 2
    assert UNSAFE.search(result.output) is None
    assert "Traceback" not in result.output


def test_the_streams_are_guarded_whoever_writes() -> None:
    def write() -> None:
        print(EVIL)
        print(EVIL, file=sys.stderr)
        logging.StreamHandler(sys.stdout).emit(logging.LogRecord("x", 20, "", 1, EVIL, None, None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "invoke", lambda ctx: write())
        result = CliRunner().invoke(main, ["ls"])
    assert result.output == f"{HARMLESS}\n" * 3


def test_a_value_of_the_environment_is_not_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", "/mnt/hunter2")
    monkeypatch.setenv("COUNT", "20480")
    (tmp_path / "r.yaml").write_text(
        "name: x\nenv: [PLACE, COUNT]\n"
        "stages: {m: {use: x, path: '${oc.env:PLACE}/in', steps: '${oc.env:COUNT}'}}\n"
    )
    recipe, _ = read_recipe(tmp_path / "r.yaml")
    assert recipe is not None
    assert recipe.stages["m"].fields["path"] == "/mnt/hunter2/in"
    with rank_log(tmp_path, 1) as log:
        log.info("20480 steps, from %s", recipe.stages["m"].fields["path"])
        failures.record(tmp_path, 1, "m", OSError("no /mnt/hunter2/in"))
    assert " INFO 20480 steps, from $PLACE/in\n" in (tmp_path / "logs/rank-00001.log").read_text()
    assert "OSError: no $PLACE/in" in (tmp_path / "failures/rank-00001.txt").read_text()
    assert "rank 1 failed in slot `m`: OSError: no $PLACE/in" in str(failures.first(tmp_path, []))
    assert not any("hunter2" in path.read_text() for path in tmp_path.rglob("*-00001.*"))


def test_values_that_are_words_stay_and_json_hides_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ON": "false", "MODE": "train", "KEY": 'p"\u00e9ss\\word'}.items():
        terminal.hide(value, f"${name}")
    record = {"ok": False, "use": "train.causal_lm", "key": 'p"\u00e9ss\\word'}
    assert json.loads(terminal.shown(json.dumps(record))) == {**record, "key": "$KEY"}
    assert terminal.shown('a p"\u00e9ss\\word') == "a $KEY"


SECRETS = {
    "HF_TOKEN": "hf_abcdEFGH1234567890",
    "aws_secret_access_key": "/kJ3bPxRfiCY+EXAMPLE",
    "DB_PASSWORD": "482910573829",
    "OPENAI_KEY": "sk-abc def/ghi",
    "STORE_CONNECTION_STRING": "AccountName=x;SharedKey=q8",
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_of_all_looks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    value = SECRETS[name]
    monkeypatch.setenv(name, value)
    terminal.hide_secrets()
    assert terminal.shown(f"is {value}.") == f"is ${name}."
    assert terminal.shown(f"\x1b[1m{value[:5]}\x1b[1;31m{value[5:]}\x1b[0m") == f"${name}"
    address = f"https://x/?p={quote(value, safe='')}"
    assert terminal.shown(address) == f"https://x/?p=${name}"


def test_the_name_of_a_file_with_a_secret_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key.json").touch()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    terminal.hide_secrets()
    assert terminal.shown(f"{tmp_path}/key.json") == f"{tmp_path}/key.json"


def test_signatures_in_addresses_are_not_said() -> None:
    address = (
        "https://s3/x?X-Amz-Date=2&X-Amz-Signature=ab12&X-Amz-Credential=id&part=1 'a?sig=b%2F'"
    )
    assert terminal.shown(address) == (
        "https://s3/x?X-Amz-Date=2&X-Amz-Signature=***&X-Amz-Credential=***&part=1 'a?sig=***'"
    )


UNNAMED = [
    "a-b-c-d", "s3cr3t", "sk live 1", "0x1f2e3d4c", "correcthorsebattery", "/absent/x9", "é-word",
]  # fmt: skip
PLAIN = {
    "MODE": "production", "LEVEL": "WARNING", "NAME": "Debian", "RELEASE": "3.11.14",
    "PEERS": "10.0.0.1 53122 10.0.0.2 22", "DATE": "2026-01-02", "GPUS": "0,1,2,3",
    "SWITCH": "false",
    "BUCKET": "s3://bucket/runs", "SERVER": "https://tracker.example:5000/",
}  # fmt: skip


@pytest.mark.parametrize("value", UNNAMED)
def test_any_value_may_be_secret(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ANYTHING", value)
    terminal.hide_secrets()
    assert terminal.shown(f"is {value}.") == f"is {value}."  # where no run is recorded
    terminal.hide_environment()
    assert terminal.shown(f"is {value}.") == "is $ANYTHING."


@pytest.mark.parametrize("name", PLAIN)
def test_words_and_what_numbers_make_up_stay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"ANY_{name}", PLAIN[name])
    terminal.hide_environment()
    assert terminal.shown(PLAIN[name]) == PLAIN[name]


NUMBERS = [
    "1732800000", "17179869184", "-123456789", "0.00012345", "123456789.5", "1e-12345", "v12345678",
    "4111 1111 1111 11111111",
]  # fmt: skip


@pytest.mark.parametrize("value", NUMBERS)
def test_numbers_stay_unless_a_name_says_that_they_are_secret(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("ANYTHING", value)
    terminal.hide_environment()
    terminal.hide(value, "$LISTED_IN_ENV")
    assert terminal.shown(f"{value} bytes") == f"{value} bytes"
    monkeypatch.setenv("MY_PIN", value)
    terminal.hide_environment()
    assert terminal.shown(f"{value} bytes") == "$MY_PIN bytes"


JSON = [
    {"size": 482910573829, "sizes": [482910573829, 1], "rate": 0.482910573829},
    {'a, "b": 1, c': 'd, "b": 1, e', "b": 1},
    {"url": 'https://x/?sig=ab"c', "next": "\\u00e9abcd \u00e9abcd"},
    [1, {"x": None, "y": True, "482910573829": "tab\t"}],
]  # fmt: skip


@pytest.mark.parametrize("content", JSON, ids=range(len(JSON)))
@pytest.mark.parametrize("indent", [None, 1])
def test_json_stays_json_whatever_is_hidden(content: Any, indent: int | None) -> None:
    """A number that is a secret as a whole becomes a text; what surrounds values stays."""
    for name, value in {"PIN": "482910573829", "A_TOKEN": '"b": 1', "B_TOKEN": "u00e9abcd"}.items():
        terminal.hide(value, f"${name}")

    def hidden(value: Any) -> Any:
        if isinstance(value, dict):
            return {hidden(key): hidden(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [hidden(inner) for inner in value]
        if value == 482910573829:
            return "$PIN"
        return terminal.shown(value) if isinstance(value, str) else value

    text = json.dumps(content, indent=indent)
    shown = terminal.shown(f"{text}\n")
    assert "482910573829" not in shown.replace("0.482910573829", "")
    assert json.loads(shown) == hidden(content)
    if indent is None:  # one in each line, as events are
        lines = terminal.shown(f"{text}\n\n{text}\n").splitlines()
        assert [json.loads(line) for line in lines if line] == [hidden(content)] * 2


def test_what_only_begins_like_json_is_text() -> None:
    terminal.hide("s3cret-8", "$KEY")
    assert terminal.shown("[s3cret-8] {s3cret-8}") == "[$KEY] {$KEY}"


@pytest.mark.parametrize("first", [True, False])
def test_what_people_have_typed_is_shown(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """Unless something says that it is secret."""
    monkeypatch.setenv("JOB", "exp-42")
    monkeypatch.setenv("OTHER", "exp-43")
    monkeypatch.setenv("MY_TOKEN", "tok-44")
    steps = [terminal.hide_environment, lambda: terminal.typed("runs/exp-42/tok-44")]
    for step in steps if first else reversed(steps):
        step()
    terminal.hide("exp-42b", "$LISTED_IN_ENV")
    said = terminal.shown("exp-42 exp-43 tok-44 exp-42b")
    assert said == "exp-42 $OTHER $MY_TOKEN $LISTED_IN_ENV"


def test_a_rank_shows_what_its_launcher_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a value that has other forms in addresses, which nobody has typed."""
    monkeypatch.setenv("JOB", "exp 42/b c")
    monkeypatch.setenv("OTHER", "exp 43/b c")
    terminal.hide_environment()
    terminal.typed("runs/exp 42/b c/1")
    found = terminal.hidden_variables()
    for texts in (terminal._guessed, terminal._hidden, terminal._typed):
        texts.clear()
    terminal.redact_output(found)
    said = terminal.shown("exp 42/b c exp%2042%2Fb%20c exp 43/b c")
    assert said == "exp 42/b c $JOB $OTHER"


def test_the_command_line_and_the_recipe_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        monkeypatch.setenv(f"ANY_{number}", f"exp-4{number}")
    monkeypatch.setattr(sys, "argv", ["pipe", "run", "r.yaml", "--run-dir", "runs/exp-40"])
    terminal.hide_environment()
    (tmp_path / "r.yaml").write_text("name: x\nextends: [other.txt]\nstages: {m: {use: exp-41}}\n")
    (tmp_path / "other.txt").write_text("exp-42, which is no recipe")
    read_recipe(tmp_path / "r.yaml")
    assert terminal.shown("exp-40 exp-41 exp-42 exp-43") == "exp-40 exp-41 $ANY_2 $ANY_3"


def test_places_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [str(tmp_path), f"{tmp_path}/new", f"{tmp_path}:{Path.home()}:", "~"]
    for number, value in enumerate(values):
        monkeypatch.setenv(f"ANY_{number}", value)
    terminal.hide_environment()
    assert terminal.shown(" ".join(values)) == " ".join(values)


def test_each_line_of_a_key_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "-----BEGIN KEY-----",
        "MIIEvQIBADANBgkqhkiG9w0BAQEF",
        "AASCBKcwggSjAgEAAoIBAQ",
        "last7x",
    ]
    monkeypatch.setenv("SIGNING", "\n".join(lines))
    terminal.hide_environment()
    for line in lines:
        assert terminal.shown(f"'{line}'") == "'$SIGNING'"


SECRET_NAMES = (
    "GITHUB_PAT PAT SLACK_WEBHOOK_URL PGPASS PGPASSWORD DB_PW MYSQL_PWD HTTP_AUTH AUTHORIZATION "
    "HF_TOKEN SLURM_JWT SENTRY_DSN AWS_ACCESS_KEY_ID SESSION_COOKIE WANDB_API_KEY PIPE_RDZV_TOKEN "
    "client_secret AZURE_STORAGE_SAS_URL CUDA_MIRROR_PASSWORD"
)
HARMLESS_NAMES = (
    "PATH LD_LIBRARY_PATH PYTHONPATH HF_HOME TMPDIR LC_ALL LANG TERM PWD OLDPWD SLURM_JOB_NODELIST "
    "CUDA_VISIBLE_DEVICES OMP_NUM_THREADS NCCL_DEBUG MASTER_ADDR RANK TORCH_EXTENSIONS_DIR "
    "TOKENIZERS_PARALLELISM SSH_AUTH_SOCK XDG_RUNTIME_DIR"
)
NEITHER_NAMES = "FOO MODEL HTTP_PROXY PIP_INDEX_URL GIT_COMMITTER_NAME PATHOLOGY RANKED XLANG"


@pytest.mark.parametrize(
    ("names", "secret", "harmless"),
    [
        (SECRET_NAMES, True, False), (HARMLESS_NAMES, False, True), (NEITHER_NAMES, False, False),
    ],
)  # fmt: skip
def test_what_names_say(names: str, secret: bool, harmless: bool) -> None:
    found = {name: (says_secret(name), is_harmless(name)) for name in names.split()}
    assert found == dict.fromkeys(found, (secret, harmless))
