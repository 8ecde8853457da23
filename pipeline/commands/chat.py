"""`pipe chat` and `pipe generate`."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands.completion import RUN
from pipeline.commands.options import Count, code_option, json_option, newest_run, run_argument
from pipeline.contracts.export import Message, TextModel, Writing, Written
from pipeline.errors import StageError
from pipeline.utils.terminal import bare, shown

if TYPE_CHECKING:
    from pipeline.execution.talk import Opener, Subject

Load = Callable[[], TextModel]
TRAINED, BASE = "trained", "base"
"""The two models, as headings and as keys of --json."""


def talk_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose a model and say how it writes."""
    options = (
        click.option("--step", metavar="N|best", help="The checkpoint of this step, or the best."),
        click.option("--beside", is_flag=True, help="Let the model before training answer, too."),
        click.option(
            "--max-tokens", type=Count(1), default=256, show_default=True,
            help="Most tokens of an answer.",
        ),
        click.option(
            "--temperature", type=click.FloatRange(0), default=0.0, show_default=True,
            help="Divide the logits by this and draw; 0 takes the most probable token.",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of the draws."),
        click.option("--system", metavar="TEXT", help="System message before the conversation."),
        click.option("--plain", is_flag=True, help="Continue texts without the chat template."),
        click.option(
            "--device", default="auto", show_default=True,
            help="Device: cpu, cuda or cuda:N; auto takes a GPU if there is one.",
        ),
        code_option,
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command("generate")
@click.argument("words", metavar="[RUN] PROMPT", nargs=-1, required=True, shell_complete=RUN)
@talk_options
@json_option
def generate(words: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Answer PROMPT with the model of RUN, by default the newest run in ./runs.

    RUN is a run, an export or a checkpoint; of a run it is the newest export, or if there is none
    the newest checkpoint. PROMPT is a user's message if the model has a chat template, and is
    continued if it has none; `-` reads it from standard input.
    """
    if len(words) > 2:
        raise click.UsageError("give at most a run and one prompt, the prompt in quotes")
    run, prompt = words if len(words) == 2 else (None, words[0])
    if run is None and Path(prompt).is_dir():
        raise click.UsageError(f"the prompt is missing: {prompt} is a folder")
    prompt = sys.stdin.read() if prompt == "-" else prompt
    with _opener(run or str(newest_run()), options) as (opener, subject):
        facts = {name: _generated(name, load, subject, prompt, options, as_json=as_json)
                 for name, load in _loads(opener, options).items()}  # fmt: skip
    if as_json:
        about = {
            "schema_version": 1, "run": subject.run, "step": subject.step,
            "export": subject.folder, "checkpoint": subject.checkpoint, "prompt": prompt,
        }  # fmt: skip
        click.echo(json.dumps({**about, **facts}, indent=1, default=str))


def _generated(
    name: str,
    load: Load,
    subject: Subject,
    prompt: str,
    options: Mapping[str, Any],
    *,
    as_json: bool,
) -> dict[str, Any]:
    """Have one model answer, and print it; the facts for programs."""
    with contextlib.closing(load()) as model:
        conversation = _conversation(options)
        _say_loaded(name, model, subject, conversation)
        if options["beside"] and not as_json:
            click.echo(f"{name}:")
        written = conversation.say(model, prompt, (lambda piece: None) if as_json else _show)
        if not as_json:
            _end_answer(written)
        return {**vars(written), "dtype": model.dtype, "device": model.device}


@click.command("chat")
@run_argument(address=True)
@talk_options
def chat(run: str, **options: Any) -> None:
    """Talk to the model of RUN, by default the newest run in ./runs.

    RUN is a run, an export or a checkpoint; of a run it is the newest export, or if there is none
    the newest checkpoint. /reset drops what was said, Ctrl-C ends an answer, /exit or Ctrl-D ends
    the chat. Where standard input is not a terminal, each of its lines is a message.
    """
    with _opener(run, options) as (opener, subject), contextlib.ExitStack() as stack:
        models = Models(_loads(opener, options))
        stack.callback(models.close)
        conversations = {name: _conversation(options) for name in models.names}
        for name, conversation in conversations.items():
            _say_loaded(name, models.model(name), subject, conversation)
        _say("/reset drops what was said, /exit or Ctrl-D ends the chat")
        for line in _lines():
            if line == "/exit":
                break
            if line == "/reset":
                for conversation in conversations.values():
                    conversation.reset()
                _say("the conversation begins again")
            elif line.startswith("/") and line[1:].isalpha():
                _say(f"there is no {line}, only /reset and /exit")
            elif line:
                _answer(line, models, conversations)


class Models:
    """The trained model, and the one before training if it is asked for: both in memory if they
    fit, else loaded in turn."""

    def __init__(self, loads: Mapping[str, Load]) -> None:
        self._loads = loads
        self._open: dict[str, TextModel] = {}
        self._in_turn = False

    @property
    def names(self) -> list[str]:
        """TRAINED, and BASE if it is asked for."""
        return list(self._loads)

    def model(self, name: str) -> TextModel:
        """Return a model, which is loaded if it is not in memory."""
        if name not in self._open:
            if not self._in_turn and not all(other.has_room() for other in self._open.values()):
                _say("memory has no room for both models: they are loaded in turn")
                self._in_turn = True
            if self._in_turn:
                self.close()
            self._open[name] = self._loads[name]()
        return self._open[name]

    def close(self) -> None:
        """Release all memory."""
        while self._open:
            self._open.popitem()[1].close()


def _answer(line: str, models: Models, conversations: Mapping[str, Conversation]) -> None:
    """Have each model answer, each with its own answers so far; Ctrl-C ends an answer."""
    for name, conversation in conversations.items():
        model = models.model(name)
        if len(conversations) > 1:
            click.echo(f"{name}:")
        try:
            _end_answer(conversation.say(model, line, _show))
        except StageError as error:
            _say(str(error))
        except KeyboardInterrupt:
            click.echo()
            _say("stopped: this message and its answer are dropped")


@contextlib.contextmanager
def _opener(run: str, options: Mapping[str, Any]) -> Iterator[tuple[Opener, Subject]]:
    """Yield what opens the models of a run, and what that is."""
    from pipeline.execution.talk import found, opener

    subject = found(run, options["step"])
    if subject.newer is not None:
        _say(f"a newer checkpoint is there: --step {subject.newer}")
    log = logging.Logger("pipe.chat", logging.WARNING)
    log.addHandler(logging.StreamHandler(sys.stderr))
    with opener(subject, log, options["device"]) as opened:
        yield opened, subject


def _loads(opener: Opener, options: Mapping[str, Any]) -> dict[str, Load]:
    return {TRAINED: opener.trained, **({BASE: opener.base} if options["beside"] else {})}


def _conversation(options: Mapping[str, Any]) -> Conversation:
    writing = Writing(
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
        seed=options["seed"],
    )
    return Conversation(writing=writing, system=options["system"], plain=options["plain"])


def _say_loaded(name: str, model: TextModel, subject: Subject, conversation: Conversation) -> None:
    """Say which model was loaded, and how it reads messages if that is not by its template."""
    what = str(subject) if name == TRAINED else "the model before training"
    _say(f"{name}: {what}, {model.dtype}, {model.device}")
    if not conversation.lays_out(model):
        why = "--plain" if model.has_template else "no chat template"
        left = "; --system is left out" if conversation.system else ""
        _say(f"{name}: {why}, so each text is continued separately{left}")


def _lines() -> Iterator[str]:
    """Yield what is typed, or the lines of standard input, which are shown."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            _show(f"> {line.strip()}\n")
            yield line.strip()
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - editing and history of lines
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ").strip()
    click.echo()


def _show(text: str) -> None:
    """Print text that is not ours. A guarded stream would let its carriage returns through."""
    click.echo(shown(text), nl=False, file=bare(sys.stdout))


def _end_answer(written: Written) -> None:
    """End the line of an answer; say if it is empty or was cut."""
    click.echo()
    if not written.text:
        _say("(no text)")
    if not written.ended:
        _say(f"cut after {written.tokens} tokens; --max-tokens allows more")


def _say(text: str) -> None:
    click.echo(text, err=True)


@dataclass(kw_only=True)
class Conversation:
    """The messages of a conversation with one model, and the settings of its answers."""

    writing: Writing
    system: str | None = None
    """Message that comes before the conversation."""
    plain: bool = False
    """Whether texts are continued as they are, separately, also where there is a template."""
    said: list[Message] = field(default_factory=list)
    """Messages of users and their answers, in turn."""

    def reset(self) -> None:
        """Drop what was said."""
        self.said = []

    def lays_out(self, model: TextModel) -> bool:
        """Whether messages take the model's chat template."""
        return model.has_template and not self.plain

    def say(self, model: TextModel, text: str, show: Callable[[str], object]) -> Written:
        """Have the model answer a message, and keep both; or, without a template, have it continue
        the text. `show` takes the pieces of the answer. Raises StageError, and keeps nothing
        then."""
        # equal messages may have different answers: each turn has its own seed
        how = replace(self.writing, seed=self.writing.seed + len(self.said))
        if not self.lays_out(model):
            return model.continue_text(text, how, show)
        before = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": text}
        written = model.answer([*before, *self.said, asked], how, show)
        self.said += [asked, {"role": "assistant", "content": written.text}]
        return written
