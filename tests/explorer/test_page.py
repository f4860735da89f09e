"""The page of `sim explore` in a real browser."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from servesim.config.layers import read_scenario_file
from servesim.config.scenario import scenario_from
from servesim.explorer.server import ExploreServer
from servesim.runs.simulate import simulate

from ..commands.running import run_sim
from ..events import wait_until
from .test_server import children, is_idle, messages, one, other_children, values

CHARTS = ["time-breakdown", "cdf-0", "cdf-1", "cdf-2", "time-waiting", "time-running", "time-kv"]
RATES = ["rate-output_throughput", "rate-p99_ttft_ms"]


class Page:
    """An open page."""

    def __init__(self, browser: Any, server: ExploreServer, state: Any = None) -> None:
        self.browser, self.server = browser, server
        browser.set_window_size(1400, 1000)
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(server.url + ("" if state is None else "#" + urllib.parse.quote(json.dumps(state))))
        self.wait()

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def wait(self, mark: str = "done") -> None:
        """Wait until the answer to the last change is complete (done) or its first picture is drawn (shown)."""
        script = "const d = document.documentElement.dataset; return d.changes && d[arguments[0]] === d.changes"
        wait_until(lambda: self.run(script, mark), f"{mark} of the last change")

    def text(self, id: str) -> str:
        return str(self.run("return document.getElementById(arguments[0]).innerText", id))

    def table(self, column: int = 0) -> dict[str, float]:
        """Return the metrics of a scenario in the table."""
        script = """return [...document.querySelectorAll('#metrics tbody tr')].map(
            row => [row.cells[0].title, Number(row.cells[1 + arguments[0]].dataset.value)])"""
        return dict(self.run(script, column))

    def type(self, key: str, text: str) -> None:
        """Set the field of a control."""
        script = """const field = document.getElementById(arguments[0]); field.value = arguments[1];
            field.dispatchEvent(new Event('change'))"""
        self.run(script, key if key in ("replications", "metric", "subject_to") else f"c-{key}", text)

    def slide(self, key: str, steps: int) -> str:
        """Move a slider by some ticks, as the arrow keys do; return the new value."""
        script = """const range = document.querySelector(`.control[data-key="${arguments[0]}"] [type=range]`);
            range.value = Number(range.value) + arguments[1]; range.dispatchEvent(new Event('input'));
            return document.getElementById('c-' + arguments[0]).value"""
        return str(self.run(script, key, steps))

    def error_at(self, key: str) -> str:
        script = """const place = document.querySelector(`.control[data-key='${arguments[0]}'] .error`);
            return place.hidden ? '' : place.innerText"""
        return str(self.run(script, key))

    def severe(self) -> list[str]:
        """Return the errors in the console."""
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_it_loads_without_an_error_and_without_another_host(browser: Any, server: ExploreServer) -> None:
    page = Page(browser, server)
    assert page.severe() == []
    loaded = page.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert {f"{server.url}{name}" for name in ("plotly.js", "charts.js", "explore.js", "run")} <= set(loaded)
    assert all(name.startswith(server.url) for name in loaded)
    ids = "return [...document.querySelectorAll('figure')].map(figure => figure.dataset.id)"
    assert page.run(ids) == CHARTS + RATES
    empty = """return [...document.querySelectorAll('figure')].filter(figure =>
        !figure.querySelector('.plot svg path.js-line, .plot svg .point path')).map(figure => figure.dataset.id)"""
    assert page.run(empty) == []
    assert page.text("better") == "The same as the baseline"


def test_nothing_is_wider_than_the_window(browser: Any, server: ExploreServer) -> None:
    page = Page(browser, server, {"pins": [{}, {"settings": {"policy.decode_batch": "48"}}]})
    try:
        for width, scheme in itertools.product((1400, 800, 390), ("light", "dark")):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            wait_until(lambda: page.run("return window.innerWidth") == width, "the new width")  # noqa: B023
            inside = "return document.documentElement.scrollWidth <= window.innerWidth"
            wait_until(lambda: page.run(inside), "a page inside the window")  # noqa: B023
            cut = """return [...document.querySelectorAll('.plot')].filter(plot =>
                plot.querySelector('.main-svg').getBoundingClientRect().width > plot.clientWidth + 1).length"""
            wait_until(lambda: page.run(cut) == 0, "charts of the new width")  # noqa: B023
            dark = "return getComputedStyle(document.body).backgroundColor === 'rgb(21, 24, 28)'"
            wait_until(lambda: page.run(dark) == (scheme == "dark"), "the colours")  # noqa: B023
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_narrow_page_breaks_no_word_and_has_no_empty_line(browser: Any, server: ExploreServer) -> None:
    page = Page(browser, server)
    try:
        size = {"width": 800, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        wait_until(lambda: page.run("return window.innerWidth") == 800, "the new width")
        broken = """return [...document.querySelectorAll('.control:not([hidden]) > label')].flatMap(label =>
            [...label.childNodes].filter(part => {
              const range = document.createRange();
              range.selectNodeContents(part);
              return range.getClientRects().length > 1;
            })).map(part => part.textContent)"""
        assert page.run(broken) == []
        bar, button = "document.querySelector('.bar .actions')", "document.getElementById('open-copy')"
        assert page.run(f"return {bar}.offsetHeight / {button}.offsetHeight") < 1.5
        inside = """return [...document.querySelectorAll('[data-id^="cdf"] .plot')].filter(plot => {
            const text = plot.querySelector('.annotation text')?.getBoundingClientRect();
            return text && text.bottom > plot.querySelector('.scatterlayer').getBoundingClientRect().top + 1}).length"""
        assert page.run("return document.querySelectorAll('[data-id^=\"cdf\"] .annotation').length") == 2
        assert page.run(inside) == 0  # no curve is behind the text of an SLO
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.live
def test_a_slider_changes_the_numbers_at_once(browser: Any, server: ExploreServer, scenario: Path) -> None:
    """The contest's 1,500 requests, in the time of a few simulations in this process at the same moment.

    Other programs may slow down a single change, so the fastest of several counts.
    """
    contest = {"X": 4, "T": 375}
    page = Page(browser, server, {"settings": {"workload.contest": json.dumps(contest)}, "pins": [{}]})
    before = page.table()
    same = scenario_from({**read_scenario_file(scenario), "workload": {"contest": contest}})
    ratios = []
    for _ in range(4):
        start = time.monotonic()
        simulate(same).result()
        reference, start = time.monotonic() - start, time.monotonic()
        value = page.slide("policy.decode_batch", 1)
        page.wait("shown")
        ratios.append((time.monotonic() - start) / reference)
        after = page.table()
        assert after["mean_ttft_ms"] != before["mean_ttft_ms"]
        before = after
        page.wait()
    assert value == "64"
    assert min(ratios) < 25, ratios


def test_the_verdict_names_the_better_side(browser: Any, server: ExploreServer) -> None:
    page = Page(browser, server)
    page.type("policy.decode_batch", "32")
    page.wait()
    assert page.text("better") == "Current is better"
    assert page.table(0)["makespan"] < page.table(1)["makespan"]
    assert "(one run each)" in page.text("verdict-text")
    page.type("policy.decode_batch", "2")
    page.wait()
    assert page.text("better") == "Baseline is better"
    page.type("replications", "3")
    page.wait()
    assert re.search(r"worse \(interval \+[\d.]+ to \+[\d.]+ %\)", page.text("verdict-text"))
    page.type("metric", "mean_tpot_ms")
    page.wait()
    assert page.text("verdict-text").startswith("By mean TPOT, current is ")
    assert page.text("better") == "Current is better"  # two slots: short steps


def test_the_copied_command_gives_the_numbers_of_the_page(
    browser: Any, server: ExploreServer, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Page(browser, server)
    page.slide("workload.contest.X", -2)
    page.slide("policy.decode_batch", 3)
    page.type("policy.order", "longest-output")
    page.wait()
    page.run("document.getElementById('open-copy').click()")
    names = "return [...document.getElementById('copy-names').children].map(button => button.textContent)"
    assert wait_until(lambda: page.run(names), "the copies")[:2] == ["command", "YAML"]
    wait_until(lambda: page.text("copy-text"), "the text to copy")
    words = shlex.split(page.text("copy-text"))
    assert words[:2] == ["sim", "run"]
    result = json.loads(run_sim(capsys, *words[1:], "--json").out)
    shown = page.table()
    assert len(shown) > 8 and all(result[metric] == value for metric, value in shown.items())


def test_the_address_gives_the_same_state_again(browser: Any, server: ExploreServer) -> None:
    page = Page(browser, server)
    page.slide("policy.decode_batch", 2)
    page.run("document.getElementById('pin-variant').click()")
    page.slide("workload.contest.X", 1)
    page.type("replications", "2")
    page.type("subject_to", "p99_ttft_ms <= 3000; p99_tpot_ms <= 90")
    page.wait()
    wait_until(
        lambda: "p99_tpot_ms <= 90" in urllib.parse.unquote(browser.current_url), "the address of the last change"
    )
    fields = """return [...document.querySelectorAll('aside input:not([type=range]), select, .terms input')].map(
        field => [field.id, field.type === 'checkbox' ? field.checked : field.value])"""

    def seen() -> Any:
        texts = [page.text(id) for id in ("better", "verdict-text", "verdict-limits", "pins", "rates-caption")]
        return page.run(fields), texts, page.table(0), page.table(1), page.table(2)

    before, address = seen(), browser.current_url
    browser.refresh()
    page.wait()
    assert seen() == before
    assert browser.current_url == address
    assert "variant 1" in before[1][3] and "p99_tpot_ms <= 90" in before[1][2]


def test_an_invalid_value_shows_the_error_at_its_control(browser: Any, server: ExploreServer) -> None:
    page = Page(browser, server)
    page.type("policy.decode_batch", "0")
    page.wait()
    assert page.error_at("policy.decode_batch").endswith("policy.decode_batch: expected at least 1, got 0")
    assert "old" in page.run("return document.getElementById('pictures').className")
    page.type("policy.decode_batch", "8")
    page.wait()
    assert page.error_at("policy.decode_batch") == ""
    page.type("slo.ttft", "soon")
    page.wait()
    assert "slo.ttft: expected" in page.error_at("slo.ttft") and "soon" in page.error_at("slo.ttft")
    page.type("slo.ttft", "")  # an empty field gets the value of the scenario file
    wait_until(lambda: page.run("return document.getElementById('c-slo.ttft').value") == "5000", "its value")
    page.wait()
    page.type("subject_to", "p99_ttft <= 3")
    page.wait()
    assert "no metric 'p99_ttft'" in page.text("terms-error")
    page.type("subject_to", "")
    page.type("replications", "many")
    page.wait()
    assert "replications" in page.text("terms-error")
    assert [text for text in page.severe() if "400" not in text] == []


def test_fifty_quick_changes_leave_no_process_and_no_stale_result(browser: Any, server: ExploreServer) -> None:
    page = Page(browser, server)
    others = other_children(server)
    script = """const done = arguments[0]; let left = 50;
        const range = document.querySelector('.control[data-key="policy.decode_batch"] [type=range]');
        const timer = setInterval(() => {
          range.value = left % 7; range.dispatchEvent(new Event('input'));
          if (!--left) { clearInterval(timer); done(document.getElementById('c-policy.decode_batch').value); }
        }, 15)"""
    value = browser.execute_async_script(script)
    page.wait()
    expected = values(one(messages(server, {"settings": {"policy.decode_batch": value}}), "picture"))
    assert page.table() == expected
    wait_until(lambda: is_idle(server), "the end of all runs")
    wait_until(lambda: len(set(children()) - others) == 2, "two workers")  # one that did not react in time was replaced
    page.run("fetch('explore.js').then(() => { window.answered = true })")
    wait_until(lambda: page.run("return window.answered"), "an answer after those of all runs")
    assert page.table() == expected
    assert page.severe() == []


def test_a_slow_scenario_shows_its_progress_and_can_be_stopped(browser: Any, server: ExploreServer) -> None:
    page = Page(browser, server)
    shown = page.table()
    page.type("workload.contest.T", "100000")
    wait_until(lambda: re.match(r"run 1 of \d+", page.text("progress-text")), "its progress")
    wait_until(lambda: page.run("return document.getElementById('part').value") > 0, "a part of the run")
    page.run("document.getElementById('stop').click()")
    assert page.text("progress-text") == "stopped"
    assert page.table() == shown
    wait_until(lambda: is_idle(server), "the end of the run")


def test_rare_settings_show_by_search(browser: Any, server: ExploreServer) -> None:
    page = Page(browser, server)
    hidden = "return document.querySelector('.control[data-key=\"engine.empty_step\"]').hidden"
    assert page.run(hidden)
    search = "const s = document.getElementById('search'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))"
    page.run(search, "runs no model")
    assert not page.run(hidden)
    assert page.run("return document.querySelectorAll('.control:not([hidden])').length") == 1
    page.run(search, "")
    assert page.run(hidden)


def test_another_preset_policy_or_trace_changes_the_controls(
    browser: Any, server: ExploreServer, tmp_path: Path
) -> None:
    page = Page(browser, server)
    keys = "return [...document.querySelectorAll('.control')].map(row => row.dataset.key)"
    page.type("start", "vllm-v1-0.32")
    wait_until(lambda: "policy.max_num_seqs" in page.run(keys), "the new controls")
    page.wait()
    assert "policy.decode_batch" not in page.run(keys)
    assert "vllm-v1-0.32" in page.text("pins")
    page.type("policy", "orca")
    wait_until(lambda: "policy.reserve" in page.run(keys), "the new controls")
    page.wait()
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,output\n" + "".join(f"{n / 2},{20 + n},{10 + n % 7}\n" for n in range(40)))
    page.type("workload", "trace")
    wait_until(lambda: "trace.path" in page.run(keys), "the new controls")
    page.wait()
    assert page.error_at("trace.path") != ""
    page.type("trace.path", str(tmp_path / "none.csv"))
    page.wait()
    assert "none.csv: no such file" in page.error_at("trace.path")
    page.type("trace.path", str(trace))
    page.wait()
    assert page.text("metrics").startswith("40 requests, one run")
    page.type("trace.rate", "8")
    page.wait()
    assert page.severe() == []


def test_four_variants_are_shown_with_the_baseline(browser: Any, server: ExploreServer) -> None:
    page = Page(browser, server)
    for batch in (4, 8, 24, 32):
        page.type("policy.decode_batch", str(batch))
        page.run("document.getElementById('pin-variant').click()")
    page.type("policy.decode_batch", "48")
    page.wait()
    assert page.run("return document.getElementById('pin-variant').disabled")
    head = "return [...document.querySelectorAll('#metrics thead th')].map(cell => cell.textContent).slice(1)"
    assert page.run(head) == ["current", "baseline", "variant 1", "variant 2", "variant 3", "variant 4"]
    traces = "return document.querySelector('[data-id=\"{}\"] .plot').data.map(trace => trace.name)"
    for chart in ("cdf-0", "time-waiting", "rate-output_throughput"):
        assert page.run(traces.format(chart)) == page.run(head)
    page.run("document.querySelectorAll('#pins li')[2].querySelectorAll('button')[1].click()")  # remove variant 1
    page.wait()
    assert len(page.run(head)) == 5 and page.table(2) != page.table(1)


def test_more_replicas_and_another_router_change_the_numbers(browser: Any, server: ExploreServer) -> None:
    page = Page(browser, server)
    alone = page.table()
    assert page.slide("cluster.replicas", 1) == "2"
    page.wait()
    two = page.table()
    assert two["mean_ttft_ms"] < alone["mean_ttft_ms"] and two["makespan"] < alone["makespan"]
    page.type("cluster.router", "random")
    page.wait()
    assert page.table()["mean_ttft_ms"] != two["mean_ttft_ms"]
    assert "means over 2 replicas" in page.run("return document.getElementById('tile-limit').textContent")
    page.type("cluster.router", "sglang-cache-aware")
    page.wait()
    assert page.run("return document.getElementById('c-cluster.router.cache_threshold').placeholder") == "0.3"
    assert page.severe() == []
