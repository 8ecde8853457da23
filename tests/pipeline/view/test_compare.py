"""Several runs: a comparison, and the page of all runs in a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.execution.rundir import locked
from pipeline.view import compare
from pipeline.view.run import History
from tests.pipeline.view.folders import EVENTS, METRICS, RECIPE, TRAINING, drawn, made, step
from tests.pipeline.view.test_run_report import Tags


def test_runs_are_compared(tmp_path: Path) -> None:
    other = {**RECIPE, "seed": 7, "stages": {**RECIPE["stages"], "wrap": {"use": "wrap.fsdp"}}}
    one = History(made(tmp_path / "one", EVENTS, METRICS))
    two = History(made(tmp_path / "two", TRAINING, METRICS[:3], other))
    differ = {row.name: row.values for row in compare.differences([one, two])["recipes"]}
    assert differ == {"seed": ("-", "7"), "stages.wrap.use": ("wrap.ddp", "wrap.fsdp")}
    assert compare.differences([one, two])["environments"] == []
    found = {row.name: row for row in compare.results([one, two])}
    assert found["state"].values == ("finished", "stopped")
    assert found["training loss"].values == ("3.4000", "3.7000")
    assert found["steps"].values == ("6", "3")
    assert found["training loss"].better == (0,)
    assert {found[name].better for name in ("state", "steps", "tokens/s (mean)")} == {()}
    page = compare.comparison_page([one, two])
    assert Tags(page).loaded == []
    plots = drawn(page)
    assert [series["label"] for series in plots[0]["series"]] == ["one", "two"]
    assert [plot["log"] for plot in plots] == [False] * len(plots)
    assert "✓" in page


def test_of_equal_values_none_is_better(tmp_path: Path) -> None:
    """Speeds that read the same are equally good; a measurement of a plugin has no better value."""
    speeds, kinds = (100.0, 300.2, 300.4, 200.0), (None, 3.0, 2.0, 2.0)
    histories = []
    for number, (speed, loss) in enumerate(zip(speeds, kinds, strict=True)):
        metrics = [step(1, tokens_per_second=speed, loss=loss, accuracy=number / 8)]
        histories.append(History(made(tmp_path / str(number), EVENTS, metrics)))
    found = {row.name: row for row in compare.results(histories)}
    assert found["tokens/s (mean)"].better == (1, 2)
    assert found["training loss"].better == (2, 3)
    assert found["training loss"].values[0] == "not a number"
    assert found["accuracy"].better == ()
    assert found["state"].equal
    text = "\n".join(
        compare.lines(list("abcd"), recipes=[], environments=[], results=[*found.values()])
    )
    assert re.search(r"^tokens/s \(mean\) +100 +300 \* +300 \* +200$", text, re.MULTILINE)
    assert "the same in all: state finished" in text
    assert "recipes are the same" in text


def later(seconds: float) -> list[dict[str, Any]]:
    return [{**event, "time": event["time"] + seconds} for event in EVENTS]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with an old finished run, a newer stopped one, and one that is damaged."""
    folder = tmp_path / "runs"
    made(folder / "old", EVENTS, METRICS)
    made(folder / "new #1", later(9000.0)[:-2], [step(1, loss=None), step(2)])
    made(folder / "damaged").joinpath("recipe.yaml").write_text("name: [")
    (folder / "old" / "report.html").touch()
    (folder / "new #1" / "report.html").touch()
    (folder / "no run").mkdir()
    return folder


def rows(page: str) -> list[list[str]]:
    table = page[page.index('<table class="runs">') : page.index("</table>")]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    return [[re.sub(r"<[^>]+>", " ", cell).strip() for cell in row] for row in cells]


def test_all_runs_newest_first(runs: Path) -> None:
    page = compare.write_folder_report(runs).read_text("utf-8")
    damaged, new, old = rows(page)  # the damaged one has no start but its folder's change, now
    assert (damaged[0].split()[0], damaged[1]) == ("damaged", "damaged")
    assert "not valid YAML" in damaged[0]
    assert new[1] == "stopped"
    assert "killed" in new[0]
    assert new[2:8] == ["2 of 20", "3.8000", "", "", "", "512"]
    assert old[1:9] == [
        "finished", "6 of 20", "3.4000", "3.3000", "3.3000", "3.3000 at step 4", "512", "0:52"
    ]  # fmt: skip
    assert [tag for tag in Tags(page).loaded if "href" in tag] == [
        "a href=new%20%231/report.html", "a href=old/report.html"
    ]  # fmt: skip
    assert [[one["label"] for one in plot["series"]] for plot in drawn(page)] == [
        ["old"], ["new #1", "old"], ["new #1", "old"]
    ]  # fmt: skip


def test_links_lead_from_where_the_page_is(runs: Path, tmp_path: Path) -> None:
    page = compare.write_folder_report(runs, tmp_path / "page.html").read_text("utf-8")
    assert 'href="runs/old/report.html"' in page
    assert not (runs / "report.html").exists()


def test_a_run_under_way_is_shown_as_such(runs: Path) -> None:
    with locked(runs / "new #1"):
        _, new, _ = rows(compare.write_folder_report(runs).read_text("utf-8"))
    assert new[1] == "running"
    assert "killed" not in new[0]


def test_texts_of_runs_stay_texts(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    made(tmp_path / name, later(0.0), METRICS).joinpath("report.html").touch()
    found = Tags(compare.write_folder_report(tmp_path).read_text("utf-8"))
    assert "img" not in found.tags
    assert found.tags.count("script") == 3


def test_curves_of_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "MOST_DRAWN", 2)
    for number in range(4):
        made(tmp_path / f"r{number}", later(100.0 * number), METRICS)
    page = compare.write_folder_report(tmp_path).read_text("utf-8")
    assert len(rows(page)) == 4
    assert "The newest 2 runs" in page
    assert [one["label"] for one in drawn(page)[0]["series"]] == ["r3", "r2"]


def test_which_folders_hold_runs(runs: Path, tmp_path: Path) -> None:
    assert compare.holds_runs(runs)
    assert not compare.holds_runs(runs / "old")
    assert not compare.holds_runs(tmp_path / "nowhere")
    assert [run.name for _, run, _ in compare.runs_in(runs)][1:] == ["new #1", "old"]
