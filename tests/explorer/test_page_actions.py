"""What a user does on the page of `sim explore`, in a real browser: choose, undo, search, save."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from servesim.explorer.notebook import Explorer
from servesim.explorer.server import ExploreServer

from ..events import wait_until
from .test_page import CHARTS, RATES, Page

RATE = "workload.arrivals.rate"
SEARCH = "const s = document.getElementById('search'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))"
FOUND = "return [...document.querySelectorAll('.control:not([hidden])')].map(row => row.dataset.key)"
OLD = "return [...document.querySelectorAll('.old')].map(part => part.id)"
DIMMED = {"verdict-lines", "tile-load", "tile-ttft", "tile-goodput", "tile-limit", "pictures", "rates-part"}


@pytest.fixture
def page(browser: Any, vllm: Explorer) -> Page:
    """The page as it opens."""
    return Page(browser, vllm._server)


def field(page: Page, key: str) -> str:
    """Return the text in the field of a control."""
    return str(page.run("return document.getElementById('c-' + arguments[0]).value", key))


def click(page: Page, id: str) -> None:
    page.run("document.getElementById(arguments[0]).click()", id)


def tile(page: Page, name: str) -> tuple[str, str, str]:
    """Return the title, the value and the small text of a tile."""
    title, value, *rest = filter(None, page.text(f"tile-{name}").split("\n"))
    return title, value, " ".join(rest)


def test_it_opens_near_the_knee_with_four_tiles(page: Page) -> None:
    rate = float(field(page, RATE))
    assert rate > 10  # the default of the workload is 4
    title, load, why = tile(page, "load")
    assert title == "Highest load within the SLO"
    assert rate < float(load.split()[0]) < 3 * rate and load.endswith("req/s") and why
    assert tile(page, "ttft")[:2] == (
        "P99 TTFT",
        page.run("return document.querySelector('[data-metric=p99_ttft_ms]').innerText"),
    )
    assert tile(page, "goodput")[0] == "Goodput" and tile(page, "goodput")[1].endswith("req/s")
    assert tile(page, "limit")[0] == "Limited by" and "this run" in tile(page, "limit")[2]
    assert page.run("return document.getElementById('tile-ttft').title") == "p99_ttft_ms"
    assert page.run("return document.querySelectorAll('.control.changed').length") == 0
    assert page.run("return document.getElementById('undo').disabled && document.getElementById('reset').disabled")
    assert page.run(OLD) == [] and page.severe() == []


def test_engine_model_and_device_are_chosen_by_name(page: Page) -> None:
    before = page.table()
    page.type("profile.device", "L4")
    wait_until(lambda: field(page, "policy.max_num_seqs") == "256", "new defaults")  # vLLM's default on a small device
    page.type("profile.model", "qwen2.5-3b")
    page.wait()
    assert "current device=L4, model=qwen2.5-3b" in page.text("pins").replace("\n", " ")
    assert page.table()["mean_tpot_ms"] > before["mean_tpot_ms"]
    page.type("server", "sglang")
    wait_until(lambda: "policy.chunked_prefill_size" in page.run(FOUND), "the controls of SGLang")
    page.wait()
    assert (field(page, "profile.device"), field(page, "profile.model")) == ("L4", "qwen2.5-3b")
    assert "sglang-0.5.18, device=L4, model=qwen2.5-3b" in page.text("pins")
    assert page.severe() == []


def test_undo_and_reset_give_earlier_states(page: Page) -> None:
    rate, before = field(page, RATE), page.table()
    page.type("policy.max_num_seqs", "8")
    page.wait()
    eight = page.table()
    assert eight != before
    page.type("profile.device", "L4")
    page.wait()
    click(page, "undo")
    page.wait()
    assert page.table() == eight and field(page, "policy.max_num_seqs") == "8"
    click(page, "undo")
    page.wait()
    assert page.table() == before and page.run("return document.getElementById('undo').disabled")
    page.type("policy.max_num_seqs", "4")
    page.type("metric", "makespan")
    click(page, "pin-variant")
    page.wait()
    click(page, "reset")
    page.wait()
    assert page.table() == before and field(page, RATE) == rate
    assert "variant 1" not in page.text("pins")
    assert page.run("return document.getElementById('metric').value") == ""
    assert page.run("return document.getElementById('reset').disabled")
    click(page, "undo")  # of the reset
    page.wait()
    assert "variant 1" in page.text("pins") and field(page, "policy.max_num_seqs") == "4"


def test_a_slider_that_moves_is_undone_at_once(page: Page) -> None:
    value = field(page, RATE)
    script = """const range = document.querySelector('.control[data-key="workload.arrivals.rate"] [type=range]');
        const now = performance.now(); performance.now = () => now; // quick on any machine
        for (const step of [1, 2, 3]) { range.value -= step; range.dispatchEvent(new Event('input')); }
        delete performance.now"""
    page.run(script)
    page.wait()
    assert field(page, RATE) != value
    click(page, "undo")
    page.wait()
    assert field(page, RATE) == value


def test_the_button_moves_the_load_to_the_knee_of_other_settings(page: Page) -> None:
    rate = float(field(page, RATE))
    page.type("profile.device", "L4")
    page.wait()
    click(page, "knee")
    page.wait()
    assert float(field(page, RATE)) < 0.5 * rate
    click(page, "undo")
    page.wait()
    assert float(field(page, RATE)) == rate


def test_the_search_finds_every_key_that_the_page_names(page: Page) -> None:
    keys = page.run("return [...document.querySelectorAll('.control')].map(row => row.dataset.key)")
    named = r"\b(?:policy|engine|workload|profile|slo|trace)\.[a-z_.]*[a-z_]"
    texts = [*re.findall(named, page.run("return document.body.textContent.split('application/json')[0]"))]
    limits = ["engine.num_blocks", "engine.gpu_memory_utilization", "engine.device_memory", "engine.front_end"]
    others = ["workload.arrivals.kind", "workload.prefixes.tokens", "profile.tensor_parallel", "request rate", "engine"]
    for key in [*keys, *texts, *limits, *others, "policy.max_num_seqs", "policy.max_num_batched_tokens"]:
        page.run(SEARCH, key)
        found = page.run(FOUND)
        assert found, key
        assert key not in keys or key in found
    page.run(SEARCH, "no such setting")
    assert page.run(FOUND) == [] and page.text("no-setting")
    page.run(SEARCH, "")


def test_results_are_dimmed_while_a_new_run_computes(browser: Any, server: ExploreServer) -> None:
    page = Page(browser, server)
    assert page.run(OLD) == []
    page.type("workload.contest.T", "100000")
    wait_until(lambda: set(page.run(OLD)) == DIMMED, "dimmed results")
    opacity = "return Number(getComputedStyle(document.getElementById('pictures')).opacity)"
    wait_until(lambda: page.run(opacity) < 0.5, "the end of the transition")
    click(page, "stop")
    assert set(page.run(OLD)) == DIMMED  # they are not the results of the controls
    click(page, "undo")
    page.wait()
    assert page.run(OLD) == []
    wait_until(lambda: page.run(opacity) == 1, "the end of the transition")


def test_a_refused_configuration_says_so_first(page: Page) -> None:
    page.type("policy.max_num_batched_tokens", "64")
    page.wait()
    assert page.text("better") == "The engine does not start with these settings"
    assert "max_num_batched_tokens" in page.text("verdict-text")
    assert page.text("verdict-limits") == "" and " met" not in page.text("verdict")
    assert tile(page, "load")[1] == "none" and "the engine does not start" in tile(page, "load")[2]
    assert set(page.run(OLD)) == DIMMED - {"verdict-lines"}
    click(page, "undo")
    page.wait()
    assert page.text("better") == "The same as the baseline" and page.run(OLD) == []


def test_the_system_prompt_and_the_prefix_cache_have_controls(page: Page) -> None:
    assert {"workload.prefixes.tokens", "policy.enable_prefix_caching"} <= set(page.run(FOUND))
    assert page.slide("workload.prefixes.tokens", 5) == "1500"
    page.wait()
    cached = page.table()
    assert cached["prefix_hit_rate"] > 0.5
    click(page, "c-policy.enable_prefix_caching")
    page.wait()
    assert page.table()["mean_ttft_ms"] > cached["mean_ttft_ms"]
    assert "enable_prefix_caching=false" in page.text("pins")
    page.slide("workload.prefixes.tokens", -5)
    page.wait()
    assert page.error_at("workload.prefixes.tokens") == "" and page.severe() == []


def test_metrics_have_the_names_of_people_with_their_keys_in_the_tooltip(page: Page) -> None:
    script = "return [...document.querySelectorAll('#metrics tbody th')].map(cell => [cell.title, cell.textContent])"
    names = dict(page.run(script))
    assert (names["mean_e2el_ms"], names["p99_ttft_ms"]) == ("Mean end-to-end latency", "P99 TTFT")
    page.type("metric", "mean_tpot_ms")
    page.type("policy.max_num_seqs", "8")
    page.wait()
    assert page.text("verdict-text").startswith("By mean TPOT, ")
    units = """return [...document.querySelectorAll('#metrics tbody tr')].map(
        row => [...row.cells].slice(1).map(cell => cell.textContent.split(' ').pop()))"""
    assert all(one == other for one, other in page.run(units) if "–" not in (one, other) and not one[0].isdigit())


def test_the_table_marks_no_difference_below_half_a_percent(page: Page) -> None:
    script = """const cells = values => values.map(value => ({ text: String(value), value }));
        const row = (metric, values) => ({ metric, name: metric, goal: 'min', cells: cells(values) });
        showTable({ table: [row('a', [100, 100.4]), row('b', [100, 100.6])], columns: [0, 1], requests: 1 });
        return [...document.querySelectorAll('#metrics .best')].map(cell => cell.dataset.metric)"""
    assert page.run(script) == ["b"]


def test_a_saved_page_has_settings_and_charts_without_the_server(browser: Any, vllm: Explorer, tmp_path: Path) -> None:
    page = Page(browser, vllm._server)
    page.type("policy.max_num_seqs", "24")
    page.wait()
    page.run("document.getElementById('pin-variant').click()")
    page.wait()
    ids = ("better", "verdict-text", "tile-load", "tile-ttft", "tile-goodput", "tile-limit", "metrics", "rates-caption")
    before = {id: page.text(id) for id in ids}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    click(page, "save")
    file = tmp_path / "explore.html"
    wait_until(file.exists, "the saved page")
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(file.as_uri())
    wait_until(lambda: page.run("return document.querySelectorAll('#rates .plot svg').length") >= 2, "the charts")
    assert {id: page.text(id) for id in ids} == before
    shown = "return [...document.querySelectorAll('figure')].map(figure => figure.dataset.id)"
    assert page.run(shown) == CHARTS + RATES
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert "max_num_seqs=24" in page.text("pins")
    texts = page.run("return document.getElementById('texts').textContent")
    assert "sim run --preset vllm-v1-0.32" in texts and "max_num_seqs: 24" in texts and "vllm serve" in texts
    assert page.severe() == []
    assert vllm._server.token not in file.read_text()
    json.loads(page.run("return document.getElementById('first').textContent"))
