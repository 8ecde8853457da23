"""Numbers of a fine-tuning that follow from its data: arithmetic, with the reasons in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.utils import counted

COVERED = 0.99
"""Share of the rows that the sequence length covers."""
FEW_LONG = 0.95
"""The same, where the rows above would make it more than twice as long."""
UNIT = 64
"""Sequence lengths are multiples of it, as kernels like them."""
LONGEST = 4096
"""Longest sequence that is chosen, and the length without a survey; `--seq` sets longer ones."""
BLOCK = 2048
"""Tokens of a block of running text."""
BLOCKS = 100
"""Blocks that a text should have; with fewer, they are shorter."""
BATCH = 64
"""Most samples of a step that are chosen."""
LEAST_BATCH = 4
STEPS_OF_EPOCH = 20
"""Steps that an epoch should have at least; with fewer, batches are smaller."""
EPOCHS = ((10_000, 3), (50_000, 2))
"""Samples below which a training has this many epochs; above, it has one."""
HELD = 0.05
MOST_HELD = 1000
"""Share and largest number of samples that are held out."""
EVALUATIONS = 10
SAVES = 5
SHORT = 200
"""Steps of a training that warms up for a tenth, not 3 %, of them."""


class Broken(NamedTuple):
    """Rows with the same kind of mistake."""

    what: str
    number: int
    first: str
    """File and line of the first."""


@dataclass(frozen=True, kw_only=True)
class DataSurvey:
    """Numbers about the rows of a file."""

    name: str
    form: str
    """For people, as in `chat messages`."""
    rows: int
    """All, the broken ones too."""
    lengths: Sequence[int] = field(repr=False)
    """Tokens of each row that can be used, or of some, chosen at random; sorted."""
    broken: tuple[Broken, ...] = ()
    empty: Broken | None = None
    """Usable rows with an empty answer, among the rows that were laid out."""
    all_read: bool = True
    """Whether every row has been laid out and tokenised."""
    running: bool = False
    """Whether rows are running text, which is cut into blocks."""
    template: str | None = None
    """Chat template for a tokenizer that has none and needs one."""
    prompt: str | None = None
    """The first user's message that opens a conversation and is short."""
    guessed: str = ""
    """Why lengths are estimates; empty if the model's tokenizer has counted."""
    parameters: int | None = None
    """Number of the model's parameters."""
    weights: str = ""
    """Type that the model's weights are quantized to; empty if they are not."""
    positions: int | None = None
    """Most tokens that the model was made for."""

    @property
    def usable(self) -> int:
        """Rows that are not broken."""
        return self.rows - sum(one.number for one in self.broken)

    @property
    def tokens(self) -> int:
        """Tokens of all usable rows."""
        return round(self.usable * sum(self.lengths) / max(len(self.lengths), 1))

    def covering(self, share: float) -> int:
        """Length that this share of the rows does not exceed."""
        return self.lengths[min(math.ceil(share * len(self.lengths)), len(self.lengths)) - 1]

    def lines(self) -> Iterator[str]:
        """Yield the survey in words."""
        broken = self.rows - self.usable
        told = f", {broken:,} of them broken" if broken else ""
        yield f"data: {counted(self.rows, 'rows')} of {self.form} in {self.name}{told}"
        for one in self.broken:
            yield f"  {counted(one.number, 'rows')}: {one.what} (first: {one.first})"
        if self.empty is not None:
            what, number, first = self.empty
            among = "" if self.all_read else f" of {len(self.lengths):,} that were read"
            yield (
                f"  {counted(number, 'rows')}{among} {what}; `data.empty: drop` leaves "
                f"{'it' if number == 1 else 'them'} out (first: {first})"
            )
        some = len(self.lengths) < self.usable
        how = f"; measured on {len(self.lengths):,} rows, chosen at random" if some else ""
        about = "about " if some or self.guessed else ""
        guessed = "; 4 characters count as a token" if self.guessed else ""
        yield (
            f"tokens: {about}{self.tokens:,}; a row has {self.covering(0.5):,} (median), "
            f"{self.covering(0.95):,} (95 %), {self.lengths[-1]:,} (longest){how}{guessed}"
        )
        if self.weights:
            yield f"weights: {self.weights}, dequantized to fp32"
        if self.guessed:
            yield f"  the model's tokenizer cannot be read: {self.guessed}"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The numbers, and a reason for each by its name in a recipe. The defaults are for a training
    without known data."""

    sequence: int
    batch: int
    samples: int = 0
    """Samples to train on."""
    held: int = 0
    fraction: float = 0.02
    """Samples held out, and their share of all; 0 of a single sample."""
    epochs: int = 1
    steps: int = 0
    warmup: float = 0.03
    eval_every: int | None = None
    """None without samples that are held out."""
    save_every: int = 200
    bad_rows: str = "error"
    why: Mapping[str, str] = field(default_factory=dict)


def choose(
    survey: DataSurvey | None, *, sequence: int | None, batch: int | None, ranks: int
) -> Choices:
    """Choose what is not given: tokens of a sample and, on `ranks` processes, samples of a step."""
    if survey is None:
        return Choices(sequence=sequence or LONGEST, batch=batch or max(BATCH, ranks))
    length, covers = _sequence(survey, sequence)
    count = _blocks(survey.tokens, length) if survey.running else survey.usable
    fraction = HELD if count * HELD <= MOST_HELD else float(f"{MOST_HELD / count:.1g}")
    held = max(1, round(count * fraction))
    if count == 1:
        held, fraction = 0, 0.0
    samples = max(count - held, 1)
    epochs = next((number for below, number in EPOCHS if samples < below), 1)
    if (size := batch or 0) == 0:
        # The largest power of two with enough steps an epoch, and at least one for each rank.
        fits = max(samples // STEPS_OF_EPOCH, LEAST_BATCH)
        size = -(-min(BATCH, 1 << fits.bit_length() - 1) // ranks) * ranks
    steps = -(-epochs * samples // size)
    # In two digits at most, the second one 0 or 5.
    unit = 10 ** max(math.floor(math.log10(max(steps / EVALUATIONS, 1))), 0)
    evaluated = max(1, round(round(2 * steps / EVALUATIONS / unit) * unit / 2))
    saved = evaluated * max(1, round(steps / SAVES / evaluated))
    warmup = 0.1 if steps < SHORT else 0.03
    broken = survey.rows - survey.usable
    drop = bool(survey.broken) or not survey.all_read
    why = {
        "sequence_length": covers,
        "heldout_fraction": f"{counted(held, 'samples')} to evaluate on" if held
        else "the only sample is trained on",
        "epochs": f"{counted(samples, 'samples')} to train on"
        f"{', enough to see each once' if epochs == 1 else ''}",
        "global_batch_size": f"{counted(-(-samples // size), 'steps')} an epoch, "
        f"{counted(steps, 'steps')} in all{'' if batch is None else ', as asked'}",
        "eval_every": f"{counted(1 + -(-steps // evaluated), 'evaluations')}, the first before "
        "training" if held else "there is nothing to evaluate on",
        "checkpoint.every": f"{counted(-(-steps // saved), 'checkpoints')}; the last two are kept",
        "warmup_ratio": counted(math.ceil(warmup * steps), "steps"),
        "bad_rows": f"{counted(broken, 'broken rows')} {'is' if broken == 1 else 'are'} left out "
        "and reported" if broken
        else "not every row was looked at: broken ones are left out and reported" if drop
        else "no row is broken",
    }  # fmt: skip
    return Choices(
        sequence=length, samples=samples, held=held, fraction=fraction, epochs=epochs, batch=size,
        steps=steps, warmup=warmup, eval_every=evaluated if held else None, save_every=saved,
        bad_rows="drop" if drop else "error", why=why,
    )  # fmt: skip


def _sequence(survey: DataSurvey, given: int | None) -> tuple[int, str]:
    """Tokens of a sample, and why."""
    most = min(LONGEST, survey.positions or LONGEST)
    if survey.running:
        fits = survey.tokens // BLOCKS
        chosen = given or max(UNIT, min(BLOCK, most, 1 << max(fits, 1).bit_length() - 1))
        blocks = _blocks(survey.tokens, chosen)
        are = "is one block" if blocks == 1 else f"are {blocks:,} blocks"
        return chosen, f"{counted(survey.tokens, 'tokens')} {are}"
    length, tail = survey.covering(COVERED), survey.covering(FEW_LONG)
    length = tail if length > 2 * tail else length
    if survey.lengths[-1] <= 1.25 * length:
        length = survey.lengths[-1]
    chosen = given or max(2, min(most, -(-length // UNIT) * UNIT))
    share = sum(one > chosen for one in survey.lengths) / len(survey.lengths)
    if not (longer := round(share * survey.usable)):
        return chosen, "all rows fit"
    cut = f"{counted(longer, 'rows')} {'is' if longer == 1 else 'are'} longer and cut"
    return chosen, f"covers {100 * (1 - longer / survey.usable):.4g} % of the rows; {cut}"


def _blocks(tokens: int, length: int) -> int:
    """Blocks of a text: its first token is not a target."""
    return max(1, -(-(tokens - 1) // length))
