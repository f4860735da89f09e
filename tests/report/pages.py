"""Open report pages in a browser, and look at what they show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..conftest import ROOT
from ..events import wait_until

SCREENSHOTS = ROOT / ".cache" / "artefacts"
OUTSIDE = """
return [...document.querySelectorAll(".chart .main-svg :is(text, path, rect, circle, line)")].filter(e => {
  const b = e.getBoundingClientRect(), f = e.closest("figure").getBoundingClientRect();
  const is = b.left < f.left - 1 || b.right > f.right + 1 || b.top < f.top - 1 || b.bottom > f.bottom + 1;
  return is && (b.width > 0 || b.height > 0) && !e.closest("defs");
}).map(e => e.closest("figure").id + ": " + (e.textContent || e.outerHTML.slice(0, 120)))
"""
OVERLAPS = """
return [...document.querySelectorAll(".chart")].flatMap(chart => {
  const texts = [...chart.querySelectorAll(".main-svg text")].filter(e => e.textContent && !e.closest(".hoverlayer"));
  const boxes = texts.map(e => [e.textContent, e.getBoundingClientRect()]);
  const common = (p, q, low, high) => Math.min(p[high], q[high]) - Math.max(p[low], q[low]);
  const overlap = (p, q) => common(p, q, "left", "right") > 1 && common(p, q, "top", "bottom") > 1;
  const hits = ([a, p], i) => boxes.slice(i + 1).filter(([, q]) => overlap(p, q)).map(([b]) => `${a} / ${b}`);
  return boxes.flatMap(hits).map(text => `${chart.id}: ${text}`);
})
"""
CUT_TABLES = """
return [...document.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth)
  .map(e => `${e.getAttribute("aria-label")}: ${e.scrollWidth} of ${e.clientWidth} pixels`)
"""
ISOLATED = """
const plot = document.querySelector(`#${arguments[0]} .plot`);
plot.scrollIntoView({block: "center"});
const box = plot.getBoundingClientRect(), { xaxis, yaxis } = plot._fullLayout;
const points = plot.data.flatMap(trace => (trace.customdata ?? []).map((configs, i) => ({
  config: configs[0],
  x: box.left + xaxis._offset + xaxis.d2p(trace.x[i]), y: box.top + yaxis._offset + yaxis.d2p(trace.y[i]),
}))).filter(point => point.config > 0);
const free = p => Math.min(...points.filter(q => q !== p).map(q => Math.hypot(p.x - q.x, p.y - q.y)));
return points.reduce((a, b) => free(b) > free(a) ? b : a)
"""  # Plotly selects the nearest point, so tests use the one that is farthest from all others


def charts_of(page: Path) -> dict[str, Any]:
    """Return the charts of a page by their ids: data and layout."""
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page.read_text(encoding="utf-8"))
    charts: dict[str, Any] = json.loads(match[1])["charts"]
    return charts


def open_page(browser: Any, page: Path, width: int, screenshot: str = "") -> None:
    """Open a page at a width, wait for its charts, and save a screenshot of the full page."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    ready = "return document.documentElement.dataset.ready === 'yes'"
    wait_until(lambda: browser.execute_script(ready), "the charts of the page")
    if screenshot:
        height = browser.execute_script("return document.documentElement.scrollHeight")
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "height": height})
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(SCREENSHOTS / screenshot))


def check_page(browser: Any, page: Path, width: int, screenshot: str) -> int:
    """Check that a page has no script error, no request and nothing outside its frame; return the number of charts."""
    open_page(browser, page, width, screenshot)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert width < 1400 or browser.execute_script(CUT_TABLES) == []
    assert browser.execute_script(OUTSIDE) == []
    assert browser.execute_script(OVERLAPS) == []
    drawn = "return [...document.querySelectorAll('.plot')].filter(e => e.querySelector('.main-svg').clientWidth > 200)"
    charts = len(browser.execute_script(drawn))
    assert charts == browser.execute_script("return document.querySelectorAll('.plot').length")
    return charts


def go_to_point(browser: Any, chart: str) -> tuple[int, Any]:
    """Move the mouse to a point of a chart until its text shows; return its configuration and the actions."""
    from selenium.webdriver.common.action_chains import ActionChains

    point = browser.execute_script(ISOLATED, chart)
    actions = ActionChains(browser)
    actions.w3c_actions.pointer_action.move_to_location(round(point["x"]), round(point["y"]))
    actions.perform()
    text = "return document.querySelector(`#${arguments[0]} .hoverlayer`).textContent"
    wait_until(lambda: browser.execute_script(text, chart), "the text at the point")
    return point["config"], actions


def visible_rows(browser: Any, table: str = "configurations") -> list[int]:
    """Return the configurations of the rows that a table shows."""
    rows = f"[...document.querySelectorAll('#{table} tbody tr')].filter(r => !r.hidden)"
    numbers: list[int] = browser.execute_script(f"return {rows}.map(r => Number(r.dataset.config))")
    return numbers


def set_filter(browser: Any, text: str, table: str = "configurations") -> list[int]:
    """Type a filter; return the configurations of the rows that stay."""
    field = browser.find_element("id", f"{table}-filter")
    field.clear()
    field.send_keys(text)
    return visible_rows(browser, table)
