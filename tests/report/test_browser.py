"""The report page of a sweep in a real browser: hover, selection, filter, frames, keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servesim.runs.metric_table import format_number
from servesim.study.sweep import load_summary

from ..events import wait_until
from .pages import check_page, go_to_point, open_page, set_filter, visible_rows


@pytest.mark.parametrize("width", [1400, 390])
def test_every_chart_is_drawn_inside_its_frame(experiment: Path, browser: Any, width: int) -> None:
    assert check_page(browser, experiment / "report.html", width, f"sweep_{width}.png") == 17
    small = "return Math.min(...[...document.querySelectorAll('.chart text, td, p, li, dd, figcaption')].map(e => "
    assert browser.execute_script(f"{small}parseFloat(getComputedStyle(e).fontSize)))") >= 10


def test_charts_keep_their_height_when_the_window_changes_its_size(experiment: Path, browser: Any) -> None:
    open_page(browser, experiment / "report.html", 1400)
    sizes = "return [...document.querySelectorAll('.plot')].map(p => [p._fullLayout.width, p._fullLayout.height])"
    before = browser.execute_script(sizes)

    def is_narrower(old: Any) -> Any:
        sizes_now = browser.execute_script(sizes)
        return all(new[0] < one[0] for new, one in zip(sizes_now, old)) and sizes_now

    size = {"width": 800, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    first = wait_until(lambda: is_narrower(before), "charts of the new width")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "width": 780})
    last = wait_until(lambda: is_narrower(first), "charts of the last width")
    assert [height for _, height in last] == [height for _, height in before]


def test_hover_shows_values_and_settings(experiment: Path, browser: Any) -> None:
    open_page(browser, experiment / "report.html", 1400)
    config, _ = go_to_point(browser, "trade-off-0")
    row = next(row for row in load_summary(experiment).rows if row.config == config)
    text = browser.execute_script("return document.querySelector('#trade-off-0 .hoverlayer').textContent")
    assert f"rank {row.rank}" in text
    assert all(setting in text for setting in row.label.split())
    assert f"Makespan (s): {format_number(row.means['makespan'].mean)}" in text


def test_a_click_on_a_point_marks_its_row_and_a_click_on_a_row_its_points(experiment: Path, browser: Any) -> None:
    open_page(browser, experiment / "report.html", 1400)
    set_filter(browser, "baseline")  # the row of the point is hidden: the click shows it again
    config, actions = go_to_point(browser, "trade-off-0")
    actions.click().perform()
    marked = "return [...document.querySelectorAll('tr.marked')].map(r => Number(r.dataset.config))"
    wait_until(lambda: browser.execute_script(marked) == [config], "the marked row")
    box = browser.execute_script("return document.querySelector('tr.marked').getBoundingClientRect().toJSON()")
    assert 0 <= box["top"] <= 900 and config in visible_rows(browser)

    row = next(row for row in load_summary(experiment).rows if row.rank == 2)
    button = browser.find_element("css selector", f"#configurations tr[data-config='{row.config}'] .mark")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    ring = "return document.querySelector('#trade-off-0 .plot').data.at(-1).x"
    both = f"return [(() => {{{marked}}})(), (() => {{{ring}}})()]"
    at_row = [[row.config], [pytest.approx(row.means["makespan"].mean)]]
    wait_until(lambda: browser.execute_script(both) == at_row, "the mark")
    button.click()
    wait_until(lambda: browser.execute_script(both) == [[], []], "no mark")


def test_the_filter_finds_exactly_the_rows_with_a_value(experiment: Path, browser: Any) -> None:
    open_page(browser, experiment / "report.html", 1400)
    rows = load_summary(experiment).rows
    for text, key, values, baseline in (  # the value of the baseline comes from its policy
        ("decode_batch=32", "policy.decode_batch", [32], 1),
        ("decode_batch=3", "policy.decode_batch", [3], 1),  # no row: 32 and 320 only begin with it
        ("prefill_batch=32", "policy.prefill_batch", [32], 1),
        ("prefill_batch=1", "policy.prefill_batch", [1], 1),
        ("policy.decode_batch=2", "policy.decode_batch", [2], 1),
        ("decode_batch>=32", "policy.decode_batch", [32, 320], 1),
        ("delay_factor=0.50", "policy.delay_factor", [0.5], 0),
        ("ORDER=longest-output", "policy.order", ["longest-output"], "arrival"),
    ):
        wanted = {row.config for row in rows if row.assignment.get(key, baseline) in values}
        assert set(set_filter(browser, text)) == wanted, text
        shown = browser.execute_script("return document.getElementById('configurations-shown').textContent")
        assert shown == f"{len(wanted)} shown"


def test_the_filter_joins_terms_and_names_an_unknown_column(experiment: Path, browser: Any) -> None:
    open_page(browser, experiment / "report.html", 1400)
    rows = load_summary(experiment).rows
    both = {row.config for row in rows if row.assignment.get("policy.decode_batch") == 32 and "swapped" in row.label}
    assert set(set_filter(browser, "swapped decode_batch=32")) == both
    assert set_filter(browser, "batch=32") == []
    shown = browser.execute_script("return document.getElementById('configurations-shown').textContent")
    assert shown.startswith("0 shown: no column batch; columns: rank, decode_batch")
    assert set_filter(browser, "baseline") == [0]


def test_the_table_sorts_by_keyboard_alone(experiment: Path, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(browser, experiment / "report.html", 1400)
    browser.switch_to.active_element.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.text == "Skip to the result"
    for _ in range(60):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        if browser.switch_to.active_element.text.startswith("Mean TTFT (s)"):
            break
    button = browser.switch_to.active_element
    assert button.tag_name == "button"
    column = browser.execute_script("return document.activeElement.closest('th').cellIndex")
    cells = "[...document.querySelectorAll('#configurations tbody tr')].map(r => r.cells[arguments[0]].dataset.v)"
    button.send_keys(Keys.ENTER)
    values = [float(value) for value in browser.execute_script(f"return {cells}", column)]
    assert values == sorted(values)
    button.send_keys(Keys.SPACE)
    values = [float(value) for value in browser.execute_script(f"return {cells}", column)]
    assert values == sorted(values, reverse=True)
    order = "return document.activeElement.closest('th').getAttribute('aria-sort')"
    assert browser.execute_script(order) == "descending"


def test_a_zoom_in_one_parameter_chart_moves_the_y_axis_of_all(experiment: Path, browser: Any) -> None:
    open_page(browser, experiment / "report.html", 1400)
    browser.execute_script("Plotly.relayout(document.querySelector('#knob-0 .plot'), {'yaxis.range': [5, 9]})")
    ranges = "return [...document.querySelectorAll('#knobs .plot')].map(e => e.layout.yaxis.range)"
    wait_until(lambda: browser.execute_script(ranges) == [[5, 9]] * 5, "the range of all charts")
