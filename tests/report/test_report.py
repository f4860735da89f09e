"""The report page: content, no external resources, and display in a browser at desktop and phone width."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from servesim.report.figures import knobs, single_change_costs
from servesim.study.number_format import format_number, ticks
from servesim.study.sweep import load_summary

from ..conftest import ROOT
from ..study import sweeps

ARTEFACTS = ROOT / ".cache" / "artefacts"
PARAMS = {
    "policy.decode_batch": [2, 4, 8],
    "policy.delay_factor": [0, 0.5],
    "policy.delay_variant": ["queue"],
    "policy.order": ["arrival", "longest-output"],
    "policy.preempted_to": ["front", "swapped"],
}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    base = sweeps.base(engine={"num_blocks": 24}, workload=sweeps.workload(60, 6.0))
    file = sweeps.sweep_file(folder, params=PARAMS, base=base, objectives=["makespan", "mean_ttft_ms", "mean_tpot_ms"])
    assert sweeps.sim("sweep", file, "-o", folder / "out", "-j", 1, "-q") == 0
    return folder / "out"


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
        if tag not in ("meta", "br", "input"):
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
    assert not re.search(r"https?://|@import|url\(", text)
    assert "<!--" not in text


def test_the_page_shows_the_winner_the_reasons_and_the_baseline(experiment: Path) -> None:
    text = Page((experiment / "report.html").read_text(encoding="utf-8")).text
    summary = load_summary(experiment)
    assert summary.winner is not None
    assert f"makespan {format_number(summary.winner.means['makespan'].mean)} ± " in text
    for title in ("Winner", "Why it wins", "Pareto front", "Effect of each setting", "Time breakdown of a request",
                  "Queues over time", "All configurations", "How to read this page"):  # fmt: skip
        assert title in text
    assert "better than the baseline, significant" in text and "Metrics: terminating: all requests." in text
    assert re.search(r"A request takes [\d.]+ s on average \(baseline: [\d.]+ s\): queued -[\d.]+ s", text)
    for label in ("decode_batch", "delay_factor", "order", "preempted_to"):
        assert label in text


def test_single_changes_are_paired_differences_from_the_winner(experiment: Path) -> None:
    summary = load_summary(experiment)
    assert summary.winner is not None
    for knob, value, change in single_change_costs(summary):
        neighbour = {**summary.winner.assignment}
        key = f"policy.{knob}"
        neighbour[key] = next(v for v in PARAMS[key] if str(v) == value)
        row = next(row for row in summary.rows if row.assignment == neighbour)
        pairs = [a["figures"]["makespan"] - b["figures"]["makespan"] for a, b in zip(row.runs, summary.winner.runs)]
        assert change.mean == pytest.approx(sum(pairs) / 3)
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
    stems = ["knobs", "pareto_makespan_mean_tpot_ms", "pareto_makespan_mean_ttft_ms", "queues", "time"]
    for kind, folder in (("png", "pictures"), ("svg", "one"), ("svg", "two")):
        assert sweeps.sim("plot", experiment, "-o", tmp_path / folder, "--format", kind) == 0
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == [f"{stem}.{kind}" for stem in stems]
    for stem in stems:
        assert (tmp_path / "one" / f"{stem}.svg").read_bytes() == (tmp_path / "two" / f"{stem}.svg").read_bytes()
        assert (tmp_path / "pictures" / f"{stem}.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_and_ticks_read_well() -> None:
    assert [format_number(x) for x in (0, 3, 1234.5, 379.1234, 46.849, 1.759, 0.8779, 0.00012)] == [
        "0", "3", "1,234", "379.1", "46.85", "1.76", "0.878", "0.00012",
    ]  # fmt: skip
    assert ticks(0, 10) == [0.0, 2.5, 5.0, 7.5, 10.0] and ticks(378.2, 383.9) == [380.0, 382.0]
    assert ticks(5, 5) == [5]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium to drive a browser")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs chromium and chromedriver (Debian: chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    for flag in f"{flags} --disable-component-update --disable-sync --hide-scrollbars".split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    yield running
    running.quit()


def open_page(browser: Any, page: Path, width: int, screenshot: str) -> None:
    """Open the page at a width and save a screenshot of the full page."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    height = browser.execute_script("return document.documentElement.scrollHeight")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "height": height})
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(ARTEFACTS / screenshot))


def test_a_browser_shows_every_chart_without_errors(experiment: Path, browser: Any) -> None:
    open_page(browser, experiment / "report.html", 1200, "report_desktop.png")
    assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    count = "return [...document.querySelectorAll(arguments[0])].filter(e => e.clientWidth > 100).length"
    assert browser.execute_script(count, "#pareto svg") == 2
    assert browser.execute_script(count, "#knobs svg") == 4
    assert browser.execute_script(count, "#queues svg") == 4  # queues and blocks of the winner and of the baseline
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_the_page_is_readable_on_a_phone(experiment: Path, browser: Any) -> None:
    open_page(browser, experiment / "report.html", 390, "report_phone.png")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    smallest = (
        "return Math.min(...[...document.querySelectorAll('svg text, td, p, li, dd, figcaption')].map(e => "
        "parseFloat(getComputedStyle(e).fontSize) * (e.ownerSVGElement ? e.ownerSVGElement.getScreenCTM().a : 1)))"
    )
    assert browser.execute_script(smallest) >= 10.0
    outside = (
        "return [...document.querySelectorAll('svg text')].filter(e => { const b = e.getBoundingClientRect(), "
        "f = e.closest('figure').getBoundingClientRect(); return b.left < f.left || b.right > f.right; }).length"
    )
    assert browser.execute_script(outside) == 0


def test_the_table_sorts_and_filters_by_keyboard_alone(experiment: Path, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get((experiment / "report.html").as_uri())
    active = browser.switch_to.active_element
    active.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.text == "Skip to the winner"
    for _ in range(400):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        if browser.switch_to.active_element.text.startswith("mean_ttft_ms"):
            break
    button = browser.switch_to.active_element
    assert button.tag_name == "button"
    rows = "[...document.querySelectorAll('#configurations tbody tr')]"
    column = f"return {rows}.map(r => parseFloat(r.cells[arguments[0]].dataset.v))"
    column_index = browser.execute_script("return document.activeElement.closest('th').cellIndex")
    button.send_keys(Keys.ENTER)
    assert (values := browser.execute_script(column, column_index)) == sorted(values)
    button.send_keys(Keys.SPACE)
    assert (values := browser.execute_script(column, column_index)) == sorted(values, reverse=True)
    order = "return document.activeElement.closest('th').getAttribute('aria-sort')"
    assert browser.execute_script(order) == "descending"
    browser.execute_script("document.getElementById('filter').focus()")
    browser.switch_to.active_element.send_keys("baseline")
    assert browser.execute_script(f"return {rows}.filter(r => !r.hidden).length") == 1
    assert browser.execute_script("return document.getElementById('shown').textContent") == "1 shown"
