"""The pages of compare, verify, runs, capacity and sweeps over rates: content, and display in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.report.page import name_metrics
from servesim.report.sweep_page import write_report
from servesim.runs.metric_table import METRICS, metric_title
from servesim.study.rate_summary import RateSummary
from servesim.study.result import load_result

from ..events import wait_until
from ..study import sweeps
from .pages import charts_of, check_page, go_to_point, open_page, set_filter

TAG = re.compile(r"<(script|style).*?</\1>|<[^>]+>", re.DOTALL)


def page_text(page: Path) -> str:
    """Return the text of a page without tags and scripts."""
    return " ".join(TAG.sub(" ", page.read_text(encoding="utf-8")).split())


def scenario(folder: Path, name: str, **policy: Any) -> Path:
    """Write a scenario."""
    base = sweeps.base(workload=sweeps.workload(60, 4.0), policy={"name": "llm-serving", "decode_batch": 8, **policy})
    (folder / name).write_text(yaml.safe_dump(base))
    return folder / name


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a sweep over rates."""
    folder = tmp_path_factory.mktemp("rates")
    keys = {"params": {"policy.decode_batch": [2, 8, 32]}, "rates": [1, 3, 9], "subject_to": ["p99_ttft_ms <= 800"]}
    file = sweeps.sweep_file(folder, base=sweeps.base(workload=sweeps.workload(60, 3.0)), **keys)
    assert sweeps.sim("sweep", file, "-o", folder / "out", "-j", 1, "-q") in (0, 1)
    return folder / "out"


def test_a_sweep_over_rates_shows_its_curves(swept: Path, browser: Any) -> None:
    text, result = page_text(swept / "report.html"), load_result(swept)
    assert isinstance(result, RateSummary) and result.winner is not None and result.winner.capacity is not None
    assert f"up to {result.winner.capacity.text}" in text and "P99 TTFT &lt;= 800 ms" in text
    assert check_page(browser, swept / "report.html", 1400, "rates_1400.png") >= 8
    config, actions = go_to_point(browser, "rate-0")
    assert "req/s" in browser.execute_script("return document.querySelector('#rate-0 .hoverlayer').textContent")
    actions.click().perform()
    marked = "return [...document.querySelectorAll('tr.marked')].map(r => Number(r.dataset.config))"
    wait_until(lambda: browser.execute_script(marked) == [config], "the marked row")
    assert browser.execute_script("return document.querySelector('#cdf-0 .plot').data.map(t => t.name)") == [
        "winner", "baseline"
    ]  # fmt: skip
    for curve in result.curves:
        assert curve.label in browser.execute_script("return document.querySelector('.key').textContent")
    good = {curve.config for curve in result.curves if curve.capacity and curve.capacity.rate >= 3}
    assert set(set_filter(browser, "capacity>=3")) == good
    assert check_page(browser, swept / "report.html", 800, "rates_800.png") >= 8


def test_the_page_of_a_sweep_over_rates_compares_the_winner_by_capacity(swept: Path) -> None:
    """At the shown rate another configuration may be the best one by the objectives."""
    result, charts = load_result(swept), charts_of(swept / "report.html")
    assert isinstance(result, RateSummary) and result.winner is not None and not result.winner.is_baseline
    assert {trace["name"] for trace in charts["cdf-0"]["data"]} == {"winner", "baseline"}
    assert {"queues-winner", "queues-baseline"} <= set(charts)
    notes = [note["text"] for note in charts["rate-0"]["layout"]["annotations"]]
    assert result.winner.capacity is not None and result.baseline.capacity is not None
    assert notes[0] in ("P99 TTFT <= 800 ms", "P99 TTFT <= 0.8 s")
    assert f"winner: {result.winner.capacity.text}" in notes[1:]
    lines = [shape["x0"] for shape in charts["rate-0"]["layout"]["shapes"] if "yref" in shape]
    assert result.winner.capacity.rate in lines
    assert [trace["line"]["width"] for trace in charts["rate-0"]["data"]][-2:] == [2.5, 2.5]  # winner, baseline on top


def test_the_curves_over_the_rate_are_drawn_as_a_file(swept: Path, tmp_path: Path, capsys: Any) -> None:
    for folder in ("one", "two"):
        assert sweeps.sim("plot", swept, "-o", tmp_path / folder, "--format", "svg") == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "two" / "rates.svg")
    assert (tmp_path / "one" / "rates.svg").read_bytes() == (tmp_path / "two" / "rates.svg").read_bytes()


def test_the_capacity_page_shows_every_tested_rate(tmp_path: Path, browser: Any) -> None:
    file, out = scenario(tmp_path, "scenario.yaml"), tmp_path / "out"
    words = ["--subject-to", "p99_ttft_ms<=800", "-o", out, "--precision", "20%", "-j", 1]
    assert sweeps.sim("capacity", file, *words) == 0
    rates = (out / "rates.csv").read_text().splitlines()[1:]
    text = page_text(out / "report.html")
    assert f"{len(rates)} rates, {len(rates)} runs; " in text and "Capacity: scenario" in text
    assert check_page(browser, out / "report.html", 1400, "capacity_1400.png") >= 4
    shown = browser.execute_script("return document.querySelectorAll('#rates tbody tr').length")
    assert shown == len(rates)
    assert sweeps.sim("capacity", file, *words[:-2], "-j", 1, "--no-report", "-o", tmp_path / "second") == 0
    assert not (tmp_path / "second" / "report.html").exists()


def test_the_comparison_page_shows_each_metric(tmp_path: Path, browser: Any, capsys: Any) -> None:
    a, b = scenario(tmp_path, "a.yaml"), scenario(tmp_path, "b.yaml", order="longest-output")
    assert sweeps.sim("compare", a, b, "--replications", 4, "-j", 1, "-o", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert f"report: {tmp_path / 'out' / 'report.html'}" in printed
    text = page_text(tmp_path / "out" / "report.html")
    for line in printed.splitlines()[3:8]:
        metric, *_, result = re.split(r"\s{2,}", line)
        name, _, unit = metric.partition(" ")
        title = metric_title(name if name in METRICS else f"{name}_ms")
        assert f"{title} {unit}" in text and result in text
    assert "4 pairs of replications" in text
    assert check_page(browser, tmp_path / "out" / "report.html", 800, "compare_800.png") == 1


def test_the_verification_page_shows_errors_and_tolerance(tmp_path: Path, browser: Any, capsys: Any) -> None:
    for name, order in (("one", "arrival"), ("two", "longest-output")):
        file = scenario(tmp_path, "scenario.yaml")
        assert sweeps.sim("run", file, "-o", tmp_path / "sim" / name) == 0
        assert sweeps.sim("run", file, "--set", f"policy.order={order}", "-o", tmp_path / "live" / name) == 0
    capsys.readouterr()
    out = tmp_path / "out"
    assert sweeps.sim("verify", tmp_path / "sim", tmp_path / "live", "-o", out, "--tolerance", "0.1%") == 3
    text = page_text(out / "report.html")
    assert "Tolerance of 0.1 %: missed" in text and "the largest error is in two" in text
    assert "step costs are written in the scenario: not measured" in text
    assert check_page(browser, out / "report.html", 800, "verify_800.png") == 3
    open_page(browser, out / "report.html", 1400)
    set_filter(browser, "scenario=one error=0", "metrics")
    rows = "return [...document.querySelectorAll('#metrics tbody tr')].filter(r => !r.hidden).length"
    assert browser.execute_script(rows) > 10


def test_texts_of_users_are_escaped(tmp_path: Path, browser: Any) -> None:
    evil = "<img src=x onerror=document.title='run'></script><b>"
    params = {"policy.order": ["arrival", "longest-output"], "policy.decode_batch": [2, 8]}
    file = sweeps.sweep_file(tmp_path, name="plain", params=params)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1, "-q") == 0
    result = load_result(tmp_path / "out")
    for row in result.by_rate[0].rows if isinstance(result, RateSummary) else result.rows:
        row.label = row.label + evil
        row.labels.append(evil)
    write_report(result, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<img src=x" not in text
    check_page(browser, tmp_path / "page.html", 1400, "")
    assert browser.execute_script("return document.title") == "Sweep report: plain"
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0


@pytest.mark.slow
def test_names_of_files_are_escaped_in_every_page(swept: Path, tmp_path: Path, browser: Any) -> None:
    evil = "<img src=x onerror=document.title='run'><b>"
    file = scenario(tmp_path, f"{evil}.yaml")
    assert sweeps.sim("compare", file, file, "--replications", 2, "-j", 1, "-o", tmp_path / "compare") == 0
    for name in ("a", evil):
        assert sweeps.sim("run", file, "-o", tmp_path / "runs" / name, "-q") == 0
    assert sweeps.sim("verify", tmp_path / "runs", tmp_path / "runs", "-o", tmp_path / "verify") == 0
    result = load_result(swept)
    assert isinstance(result, RateSummary)
    for curve in result.curves:
        curve.label += evil
    write_report(result, tmp_path / "rates" / "report.html")
    for page in ("compare", "verify", "rates"):
        text = (tmp_path / page / "report.html").read_text(encoding="utf-8")
        assert "onerror=document.title" in text and "<img src=x" not in text
        open_page(browser, tmp_path / page / "report.html", 1400)
        assert browser.execute_script("return document.title") != "run"
        assert browser.execute_script("return document.querySelectorAll('img, main b:not(.settings b)').length") == 0


def test_the_page_of_a_run_shows_times_queues_blocks_and_its_limit(tmp_path: Path, browser: Any, capsys: Any) -> None:
    workload = {**sweeps.workload(60), "arrivals": {"kind": "poisson", "rate": 50.0}}
    tree = sweeps.base(policy={"name": "vllm-v1", "max_num_seqs": 2}, engine={"num_blocks": 400}, workload=workload)
    (tmp_path / "base.yaml").write_text(json.dumps(tree), encoding="utf-8")
    run, page = tmp_path / "run", tmp_path / "run" / "report.html"
    assert sweeps.sim("run", tmp_path / "base.yaml", "-o", run) == 0
    assert sweeps.sim("report", run) == 0
    assert capsys.readouterr().out.endswith(f"{page}\n")
    charts = charts_of(page)
    assert list(charts) == ["cdf-0", "cdf-1", "cdf-2", "time-breakdown", "queues-this run", "blocks-this run"]
    assert max(charts["queues-this run"]["data"][1]["y"]) == 2, "running requests"
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    parts = sum(trace["x"][0] for trace in charts["time-breakdown"]["data"])
    assert parts == pytest.approx(sum(result["mean_seconds"].values()))
    check_page(browser, page, 1400, "run_1400.png")
    check_page(browser, page, 800, "run_800.png")
    card = browser.find_element("id", "result").text
    assert result["limit"] == "slots" and result["limit_text"] in card
    assert f"Mean end-to-end latency {result['mean_e2el_ms'] / 1e3:.2f} s" in card
    assert browser.find_element("css selector", ".big abbr").get_attribute("title") == "mean_e2el_ms"
    assert "--max-num-seqs 2" in browser.find_element("id", "server-command").text
    button = browser.find_element("css selector", "button.copy")
    browser.execute_script("navigator.clipboard.writeText = async text => { window.copied = text }")
    button.click()
    wait_until(lambda: button.text == "Copied", "the copy")
    assert "vllm serve" in browser.execute_script("return window.copied")


def test_evicted_blocks_have_no_chart_if_nothing_is_shared(tmp_path: Path, capsys: Any) -> None:
    tree = sweeps.base(policy={"name": "vllm-v1"}, engine={"num_blocks": 60}, workload=sweeps.workload(60))
    (tmp_path / "base.yaml").write_text(json.dumps(tree), encoding="utf-8")
    assert sweeps.sim("run", tmp_path / "base.yaml", "-o", tmp_path / "run") == 0
    assert sweeps.sim("report", tmp_path / "run") == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["prefix_cache_evictions"] > 0
    assert not [name for name in charts_of(tmp_path / "run" / "report.html") if name.startswith(("hits", "evicted"))]


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("p99_ttft_ms", '<abbr title="p99_ttft_ms">P99 TTFT</abbr>'),
        ("failed", '<abbr title="failed">Failed requests</abbr>'),
        ("2 runs failed", "2 runs failed"),
        ("misses mean_e2el_ms <= 5000", 'misses <abbr title="mean_e2el_ms">mean end-to-end latency</abbr> &lt;= 5 s'),
        ("p99_ttft_ms <= 1.05 * baseline", '<abbr title="p99_ttft_ms">P99 TTFT</abbr> &lt;= 1.05 * baseline'),
        ("by p99.9_itl_ms[priority=0]",
         'by <abbr title="p99.9_itl_ms[priority=0]">P99.9 ITL, priority 0</abbr>'),
        ("policy.busy_s <b>", "policy.busy_s &lt;b&gt;"),
    ],
)  # fmt: skip
def test_pages_name_metrics_as_people_do(text: str, html: str) -> None:
    assert name_metrics(text) == html


def test_a_prefix_cache_has_charts_of_its_hits_blocks_and_evictions(
    tmp_path: Path, browser: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prefixes = {"count": 6, "tokens": 800, "share": 0.8}
    base = sweeps.base(
        policy={"name": "vllm-v1"}, engine={"num_blocks": 400}, workload={**sweeps.workload(300), "prefixes": prefixes},
    )  # fmt: skip
    params = {"policy.enable_prefix_caching": [False, True]}
    file = sweeps.sweep_file(tmp_path, base=base, params=params, baseline={"policy.enable_prefix_caching": False})
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "-j", 1) == 0
    assert "prefix_hit_rate" in capsys.readouterr().out
    page = tmp_path / "out" / "report.html"
    charts = charts_of(page)
    cache = [name for name in charts if name.startswith(("blocks", "hits", "evicted"))]
    assert cache == ["blocks-winner", "blocks-baseline", "hits-winner", "evicted-winner"]
    assert [line["name"] for line in charts["blocks-winner"]["data"]] == ["blocks used", "cached blocks"]
    assert [line["name"] for line in charts["blocks-baseline"]["data"]] == ["blocks used"]
    rates, evicted = charts["hits-winner"]["data"][0]["y"], charts["evicted-winner"]["data"][0]["y"]
    assert 20 < len(rates) <= 61 and 0 < max(rates) <= 100
    assert evicted == sorted(evicted) and evicted[-1] > 0
    check_page(browser, page, 1400, "cache_1400.png")


def test_the_page_of_a_fleet_shows_each_replica(tmp_path: Path, browser: Any, capsys: Any) -> None:
    tree = sweeps.base(
        policy={"name": "vllm-v1"}, engine={"num_blocks": 400}, workload=sweeps.workload(60, 20.0),
        cluster={"pools": [{"name": "big", "replicas": 2}, {"name": "<b>small", "engine": {"num_blocks": 100}}]},
    )  # fmt: skip
    (tmp_path / "fleet.json").write_text(json.dumps(tree), encoding="utf-8")
    run, page = tmp_path / "run", tmp_path / "run" / "report.html"
    assert sweeps.sim("run", tmp_path / "fleet.json", "-o", run) == 0
    assert sweeps.sim("report", run) == 0
    capsys.readouterr()
    load = charts_of(page)["replica-load"]
    assert [trace["name"] for trace in load["data"]] == ["big/0", "big/1", "&lt;b&gt;small/0"]
    assert all(max(trace["y"]) > 0 and trace["y"][-1] == 0 for trace in load["data"])
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    check_page(browser, page, 1400, "fleet_1400.png")
    check_page(browser, page, 800, "fleet_800.png")
    script = (
        "return [...document.querySelectorAll('#replicas tbody tr')].map(row => [...row.cells].map(c => c.innerText))"
    )
    rows = browser.execute_script(script)
    assert [row[:2] for row in rows] == [[row["name"], str(row["requests"])] for row in result["replicas"]]
    assert "Replicas: 3, router round-robin." in page_text(page)
