"""`pipe chat` and `pipe generate`."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands import options
from pipeline.commands.options import Count, flag, option
from pipeline.contracts.export import Message, TextModel, Writing, Written
from pipeline.errors import StageError
from pipeline.utils.terminal import bare, shown

if TYPE_CHECKING:
    from pipeline.execution.talk import Subject

TRAINED, BASE = "trained", "base"
"""The two models, as headings and as keys of --json."""

talk_options = options.together(
    option("--step", "The checkpoint of this step, or the best.", metavar="N|best"),
    flag("--beside", "Let the model before training answer, too."),
    option("--max-tokens", "Most tokens of an answer.", type=Count(1), default=256),
    option("--temperature", "Divide the logits by this and draw; 0 takes the most probable token.",
           type=click.FloatRange(0), default=0.0),
    option("--seed", "Seed of the draws.", type=int, default=0),
    option("--system", "System message before the conversation.", metavar="TEXT"),
    flag("--plain", "Continue texts without the chat template."),
    option("--device", "Device: cpu, cuda or cuda:N; auto takes a GPU if there is one.",
           default="auto"),
    options.trust_code,
)  # fmt: skip
"""Options that choose a model and say how it writes; `_talk` takes their values."""


@click.command("generate")
@click.argument("words", metavar="[RUN] PROMPT", nargs=-1, required=True,
                shell_complete=options.complete_runs)  # fmt: skip
@talk_options
@options.as_json
def generate(words: tuple[str, ...], as_json: bool, **given: Any) -> None:
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
    facts = dict[str, Any]()
    with _talk(run or str(options.newest_run()), **given) as talk:
        for name in talk.loads:
            talk.introduce(name)
            model = talk.model(name)
            if as_json:
                written = talk.say(name, prompt, lambda piece: None)
            else:
                written = talk.show(name, prompt, heading=given["beside"])
            facts[name] = {**vars(written), "dtype": model.dtype, "device": model.device}
            talk.close()
    if as_json:
        subject = talk.subject
        about = {
            "schema_version": 1, "run": subject.run, "step": subject.step,
            "export": subject.folder, "checkpoint": subject.checkpoint, "prompt": prompt,
        }  # fmt: skip
        click.echo(json.dumps({**about, **facts}, indent=1, default=str))


@click.command("chat")
@options.run(address=True)
@talk_options
def chat(run: str, **given: Any) -> None:
    """Talk to the model of RUN, by default the newest run in ./runs.

    RUN is a run, an export or a checkpoint; of a run it is the newest export, or if there is none
    the newest checkpoint. /reset drops what was said, Ctrl-C ends an answer, /exit or Ctrl-D ends
    the chat. Where standard input is not a terminal, each of its lines is a message.
    """
    with _talk(run, **given) as talk:
        for name in talk.loads:
            talk.introduce(name)
        _note("/reset drops what was said, /exit or Ctrl-D ends the chat")
        for line in _lines():
            if line == "/exit":
                break
            if line == "/reset":
                talk.said.clear()
                _note("the conversation begins again")
            elif line.startswith("/") and line[1:].isalpha():
                _note(f"there is no {line}, only /reset and /exit")
            elif line:
                for name in talk.loads:
                    talk.model(name)
                    try:
                        talk.show(name, line, heading=given["beside"])
                    except StageError as error:
                        _note(str(error))
                    except KeyboardInterrupt:
                        click.echo()
                        _note("stopped: this message and its answer are dropped")


@dataclass(kw_only=True)
class Talk:
    """A conversation with the trained model, and one with the model before training if it is asked
    for: both models are in memory if they fit, else they are loaded in turn."""

    subject: Subject
    loads: Mapping[str, Callable[[], TextModel]]
    writing: Writing
    system: str | None
    """Message that comes before the conversation."""
    plain: bool
    """Whether texts are continued as they are, separately, also where there is a template."""
    said: dict[str, list[Message]] = field(default_factory=lambda: defaultdict(list))
    """Messages of users and answers of each model, in turn."""
    open: dict[str, TextModel] = field(default_factory=dict)
    in_turn: bool = False

    def model(self, name: str) -> TextModel:
        """Return a model, which is loaded if it is not in memory."""
        if name not in self.open:
            if not self.in_turn and not all(other.has_room() for other in self.open.values()):
                _note("memory has no room for both models: they are loaded in turn")
                self.in_turn = True
            if self.in_turn:
                self.close()
            self.open[name] = self.loads[name]()
        return self.open[name]

    def close(self) -> None:
        """Release all memory."""
        while self.open:
            self.open.popitem()[1].close()

    def introduce(self, name: str) -> None:
        """Say which model was loaded, and how it reads messages if not by its template."""
        model = self.model(name)
        what = str(self.subject) if name == TRAINED else "the model before training"
        _note(f"{name}: {what}, {model.dtype}, {model.device}")
        if self.plain or not model.has_template:
            why = "--plain" if model.has_template else "no chat template"
            left = "; --system is left out" if self.system else ""
            _note(f"{name}: {why}, so each text is continued separately{left}")

    def say(self, name: str, text: str, show: Callable[[str], object]) -> Written:
        """Have a model answer a message, and keep both; or, without a template, have it continue
        the text. `show` takes the pieces of the answer. Raises StageError, and keeps nothing
        then."""
        model, said = self.model(name), self.said[name]
        # equal messages may have different answers: each turn has its own seed
        how = replace(self.writing, seed=self.writing.seed + len(said))
        if self.plain or not model.has_template:
            return model.continue_text(text, how, show)
        before = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": text}
        written = model.answer([*before, *said, asked], how, show)
        said += [asked, {"role": "assistant", "content": written.text}]
        return written

    def show(self, name: str, text: str, *, heading: bool) -> Written:
        """Print the answer as it comes; say if it is empty or was cut."""
        if heading:
            click.echo(f"{name}:")
        written = self.say(name, text, _show)
        click.echo()
        if not written.text:
            _note("(no text)")
        if not written.ended:
            _note(f"cut after {written.tokens} tokens; --max-tokens allows more")
        return written


@contextlib.contextmanager
def _talk(
    run: str, *, step: str | None, beside: bool, device: str, system: str | None, plain: bool,
    **writing: Any,
) -> Iterator[Talk]:  # fmt: skip
    from pipeline.execution.talk import found, opener

    subject = found(run, step)
    if subject.newer is not None:
        _note(f"a newer checkpoint is there: --step {subject.newer}")
    log = logging.Logger("pipe.chat", logging.WARNING)
    log.addHandler(logging.StreamHandler(sys.stderr))
    with opener(subject, log, device) as models:
        loads = {TRAINED: models.trained} | ({BASE: models.base} if beside else {})
        talk = Talk(
            subject=subject, loads=loads, writing=Writing(**writing), system=system, plain=plain
        )
        with contextlib.closing(talk):
            yield talk


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


_note = functools.partial(click.echo, err=True)
