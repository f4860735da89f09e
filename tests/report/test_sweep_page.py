"""The report page of a sweep: content, no external resources, reproducible files; test_browser.py shows it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from operator import le
from pathlib import Path

import pytest
from servesim.report import sweep_page
from servesim.report.knobs import knobs
from servesim.report.page import plotly_script
from servesim.report.rate_charts import MAX_NAMED, over_rate, styled
from servesim.report.sweep_page import request_times
from servesim.report.trade_offs import front_rows, pairs
from servesim.runs.metric_table import format_number
from servesim.study.ranking import Row
from servesim.study.rates import Curve, RatePoint
from servesim.study.sweep import load_summary

from ..study import sweeps
from .conftest import PARAMS
from .pages import charts_of


class Page(HTMLParser):
    """The tags, attributes and text of a page; checks that every open tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input", "wbr"):  # they have no end
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_has_no_external_resources(experiment: Path) -> None:
    text = (experiment / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href")]
    assert links and all(str(link).startswith("#") for link in links)
    own = text.replace(plotly_script(), "")
    assert len(text) < 6e6 and len(own) < 1e6
    assert not re.search(r"https?://|@import|url\(", own)


def test_the_times_of_the_baseline_alone_are_the_parts_of_its_mean(experiment: Path) -> None:
    """The page shows them if nothing beats the baseline."""
    baseline = load_summary(experiment).baseline
    text = request_times(baseline, baseline)
    total, *parts = map(float, re.findall(r"([\d.]+) s\b", text))
    assert "baseline" not in text and parts == sorted(parts, reverse=True)
    assert total == pytest.approx(baseline.mean("mean_e2el_ms") / 1e3, rel=0.01)
    assert sum(parts) == pytest.approx(total, rel=0.03)  # without parts below 0.5 %


def test_single_changes_are_paired_differences_from_the_winner(experiment: Path) -> None:
    summary = load_summary(experiment)
    for knob in knobs(summary):
        for point in knob.single_change:
            assert point.row.assignment == {**summary.winner.assignment, knob.key: point.value}
            change = summary.difference(point.row, summary.winner, "makespan")
            assert (point.result.mean, point.result.half_width) == (point.row.mean("makespan"), change.half_width)
    assert [knob.key for knob in knobs(summary)] == [key for key in PARAMS if len(PARAMS[key]) > 1]
    best = {point.value: point.result.mean for point in knobs(summary)[0].best}
    for batch, mean in best.items():
        rows = [row for row in summary.rows if row.eligible and row.assignment.get("policy.decode_batch") == batch]
        assert mean == min(row.means["makespan"].mean for row in rows)


def test_the_page_is_reproducible(experiment: Path, tmp_path: Path) -> None:
    assert sweeps.sim("report", experiment, "-o", tmp_path / "again.html") == 0
    assert (tmp_path / "again.html").read_bytes() == (experiment / "report.html").read_bytes()
    assert sweeps.sim("report", tmp_path) == 2


def test_plots_are_written_as_reproducible_files(experiment: Path, tmp_path: Path) -> None:
    stems = [
        "knobs", "pareto_makespan_mean_tpot_ms", "pareto_makespan_mean_ttft_ms",
        "pareto_mean_tpot_ms_output_throughput", "pareto_output_throughput_mean_ttft_ms",
    ]  # fmt: skip
    for kind, folder in (("png", "pictures"), ("svg", "one"), ("svg", "two")):
        assert sweeps.sim("plot", experiment, "-o", tmp_path / folder, "--format", kind) == 0
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == [f"{stem}.{kind}" for stem in stems]
    for stem in stems:
        assert (tmp_path / "one" / f"{stem}.svg").read_bytes() == (tmp_path / "two" / f"{stem}.svg").read_bytes()
        assert (tmp_path / "pictures" / f"{stem}.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_have_their_significant_digits() -> None:
    assert [format_number(x) for x in (0, 3, 1234.5, 379.1234, 46.849, 1.759, 0.8779, 0.00012)] == [
        "0", "3", "1,234", "379.1", "46.85", "1.76", "0.878", "0.00012",
    ]  # fmt: skip


def test_the_pareto_front_of_two_measures_is_that_of_all_pairs(experiment: Path) -> None:
    summary = load_summary(experiment)
    for x, y in pairs(summary):
        front = front_rows(summary.rows, x, y)
        scores = {row.config: (x.sign * row.mean(x.metric), y.sign * row.mean(y.metric)) for row in summary.rows}
        worse = {a for a in scores for b in scores if scores[b] != scores[a] and all(map(le, scores[b], scores[a]))}
        assert {row.config for row in front} == scores.keys() - worse
        assert [row.mean(x.metric) for row in front] == sorted(row.mean(x.metric) for row in front)


def test_the_table_of_a_large_sweep_is_cut(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_page, "MAX_TABLE_ROWS", 10)
    summary = load_summary(experiment)
    shown = [row.style.config for row in sweep_page.configurations(summary).rows]
    assert shown[:10] == [row.config for row in summary.rows[:10]]
    front = {row.config for row in summary.rows[10:] if row.on_pareto_front}
    assert set(shown[10:]) == front | {0} and len(shown) < len(summary.rows)


def test_limits_fronts_and_axes_of_the_charts(experiment: Path) -> None:
    """SLO lines have the unit of their axis, fronts are lines, long ranges are logarithmic, queues are not cut."""
    charts = charts_of(experiment / "report.html")
    for id, chart in charts.items():
        if id.startswith("trade-off"):
            assert chart["data"][0]["mode"] == "lines" and chart["data"][0]["name"] == "Pareto front"
        for side in ("x", "y"):
            values = [v for trace in chart["data"] for v in trace[side] if isinstance(v, (int, float)) and v]
            if (id.startswith(("trade-off", "cdf")) and side == "x") or id.startswith("trade-off"):
                is_log = chart["layout"][f"{side}axis"].get("type") == "log"
                assert is_log == (min(values) > 0 and max(values) >= 10 * min(values)), (id, side)
        if id.startswith("queues"):
            assert chart["layout"]["yaxis"]["range"][1] > max(value for trace in chart["data"] for value in trace["y"])
    notes = [note["text"] for chart in charts.values() for note in chart["layout"].get("annotations", [])]
    assert {"SLO tpot 40 ms"} <= set(notes) and any(text in notes for text in ("SLO ttft 900 ms", "SLO ttft 0.9 s"))
    assert {trace["name"] for trace in charts["cdf-0"]["data"]} == {"winner", "baseline"}


def test_every_constraint_is_a_line_of_a_chart(tmp_path: Path) -> None:
    bounds = ["p95_e2el_ms <= 9000", "mean_tpot_ms <= 70", "request_throughput >= 1"]
    file = sweeps.sweep_file(tmp_path, objectives=["makespan", "mean_ttft_ms"], subject_to=bounds)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "-q") == 0
    charts = charts_of(tmp_path / "out" / "report.html").values()
    notes = [note["text"] for chart in charts for note in chart["layout"].get("annotations", [])]
    for text in ("P95 end-to-end latency <= 9 s", "Mean TPOT <= 70 ms", "Request throughput >= 1 req/s"):
        assert any(note.startswith(text) for note in notes), (text, notes)


def test_a_parameter_with_many_values_has_few_texts(tmp_path: Path) -> None:
    params = {"policy.decode_batch": {"range": [1, 24], "step": 1}, "policy.group_width": [4]}
    file = sweeps.sweep_file(tmp_path, params=params, replications=1)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "-q") == 0
    axis = charts_of(tmp_path / "out" / "report.html")["knob-0"]["layout"]["xaxis"]
    assert axis["ticktext"][:3] == ["1", "4", "7"] and len(axis["ticktext"]) <= 10


def curves(count: int) -> list[Curve]:
    points = []
    for rate in (1.0, 2.0):
        run = {"replication": 0, "metrics": {"p99_ttft_ms": 10 * rate, "output_throughput": rate}}
        points.append(RatePoint(rate, Row(0, {}, "", [run]), {}))
    outcomes = ["worse", "best", *["worse"] * count]
    return [Curve(k, {}, f"curve {k}", points, (), outcome=outcome) for k, outcome in enumerate(outcomes)]


def test_no_two_named_curves_look_the_same() -> None:
    styles = [style for _, style in styled(curves(MAX_NAMED))]
    assert len(set(styles)) == MAX_NAMED + 2
    assert any(style.dashed for style in styles) and not styles[0].dashed
    lines = [trace["line"] for trace in over_rate(styled(curves(MAX_NAMED)), "p99_ttft_ms", [], "rates").data]
    assert len({(line["color"], line["dash"]) for line in lines}) == MAX_NAMED + 2


def test_many_curves_are_grey_except_winner_and_baseline() -> None:
    styles = [style for _, style in styled(curves(MAX_NAMED + 1))]
    assert [style.colour for style in styles[:3]] == ["@baseline", "@winner", "@point"]
    assert len(set(styles)) == 3
