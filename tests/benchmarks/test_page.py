"""docs/results.md is what benchmarks/page.py makes of the raw files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import overhead_job
import overhead_stats
import page
import page_tables
import pytest
import raw
import start
import start_run
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
FILES = sorted(raw.RESULTS.glob("*.json"))


def test_the_page_is_what_the_program_writes() -> None:
    assert page.PAGE.read_text("utf-8") == page.page(), "run python benchmarks/page.py"
    ended = CliRunner().invoke(page.main, ["--check"])
    assert ended.exit_code == 0, ended.output


def test_a_page_that_was_edited_by_hand_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = tmp_path / "results.md"
    edited.write_text(page.page().replace("14,715", "15,000"), "utf-8")
    monkeypatch.setattr(page, "PAGE", edited)
    ended = CliRunner().invoke(page.main, ["--check"])
    assert ended.exit_code == 1
    assert "run python benchmarks/page.py" in ended.output


def test_the_page_can_be_read_in_ten_minutes() -> None:
    assert len(page.page().split()) <= 2400


def test_the_readme_has_numbers_of_the_page() -> None:
    text, numbers = (ROOT / "README.md").read_text("utf-8"), page.numbers()
    for name in ("lora_tokens", "lora_mfu", "fp8_tokens", "full_tokens", "full_mfu",
                 "full_of_bare", "nemo_tokens", "memory_close", "speed_close"):  # fmt: skip
        assert numbers[name] in text, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_raw_file_says_what_was_measured_and_where(file: Path) -> None:
    found = json.loads(file.read_text("utf-8"))
    assert found.keys() >= {*raw.KEYS}
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
    assert file.stem.startswith(
        f"{found['benchmark'].replace(' by others', '')}-{found['date']}"
    ) or (found["origin"].startswith("published: https://"))
    assert found["machine"].keys() == {"processor", "cores", "memory_gib", "gpus"}
    assert re.match(r"(measured|transcribed|published)\b", found["origin"])
    assert found["commands"] or found["origin"].startswith("published")
    assert "/home/" not in file.read_text("utf-8")
    assert "/tmp/" not in file.read_text("utf-8")


def test_a_program_says_how_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = ROOT / "benchmarks" / "start.py"
    words = ["--rounds", "3", "--json", str(tmp_path / "x.json")]
    monkeypatch.setattr("sys.argv", [str(program), *words])
    raw.write(tmp_path / "x.json", "start", [{"strategy": "ddp"}], pairs=1)
    found = json.loads((tmp_path / "x.json").read_text("utf-8"))
    assert found["commands"] == ["python benchmarks/start.py --rounds 3"]
    assert found["origin"] == "measured"
    assert (found["rows"], found["pairs"]) == ([{"strategy": "ddp"}], 1)
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["torch"]


def shown(monkeypatch: pytest.MonkeyPatch, table: Any, rows: list[dict[str, Any]]) -> list[str]:
    """Return the cells of the only row of a table of these raw rows."""
    monkeypatch.setattr(page_tables, "rows", lambda name: rows)
    (line,) = table().splitlines()[2:]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ratios_to_cp_are_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        {"group": "g", "tool": tool, "round": number, "written": seconds, "anonymous_mib": 5}
        for tool, times in (("cp", (1.0, 10.0, 2.0)), ("ours", (2.0, 10.0, 8.0)))
        for number, seconds in enumerate(times)
    ]
    assert shown(monkeypatch, page_tables.export, runs) == ["ours", "2.00", "5"]


def test_only_memory_that_counts_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [
        {"source": "s", "memory": {"published": 10.0, "planned": planned, "counted": counted}}
        for planned, counted in ((9.0, True), (30.0, False), (11.0, True))
    ]
    speeds = [{"source": "s", "speed": {"published": 100.0, "expected": 50.0}}]
    cells = shown(monkeypatch, page_tables.published, [*sizes, *speeds])
    assert cells == ["s", "1.00 (0.90 to 1.10, 2 runs)", "0.50"]


def test_a_ratio_of_seconds_is_the_median_over_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"ours": (1.0, 9.0, 4.0), "other": (2.0, 3.0, 4.0)}
    runs = [
        {"case": "chat", "way": way, "rounds": [{"seconds": one} for one in seconds]}
        for way, seconds in ways.items()
    ]
    assert shown(monkeypatch, page_tables.tokenising, runs) == ["chat", "4.00", "3.00 (1.00)"]


def test_a_new_measurement_of_the_loop_makes_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = overhead_job.Job(
        strategy="ddp", procs=2, compute="fp32", device="cpu", model={}, folder=tmp_path,
        length=4, micro_batch=1, rounds=8, steps=1,
    )  # fmt: skip
    block = {"cpu": 1.0, "before": 1.0, "after": 1.0, "loss": 5.0}
    pair = {"ours": {"seconds": 2.04, **block}, "bare": {"seconds": 2.0, **block}}
    row = overhead_stats.as_row(job.label, overhead_stats.compare([pair] * 8, 100))
    monkeypatch.setattr(page_tables, "rows", lambda name: [row])
    head, _, line = page_tables.overhead().splitlines()
    assert (head, line) == ("| strategy | 2 processes |", "| ddp | 1.020 [1.020, 1.020] |")


def test_a_new_measurement_of_starts_makes_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [start_run.Start(seconds=s, cpu=s) for s in (11.0, 30.0, 5.0)]
    script = [start_run.Start(seconds=10.0, cpu=1.0)] * 3
    row = start.figures("ddp", ours, script)
    assert row["cpu_ratios"] == [11.0, 30.0, 5.0]
    cells = shown(monkeypatch, page_tables.start, [row])
    assert cells == ["ddp", "11.00", "10.00", "1.10 (0.50 to 3.00)"]
