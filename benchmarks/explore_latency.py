"""From the slider to the new picture of `sim explore`, in Chromium: python benchmarks/explore_latency.py [CHANGES]

1,500 requests of the contest. Each change of the slider of `decode_batch` is a scenario that has not run before; the
time ends when all charts are drawn. First single changes, then a slider that moves on as soon as it sees a picture.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import servesim

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from explore_picture import SCENARIO, open_browser

MOVE = """const row = document.querySelector('.control[data-key="policy.decode_batch"] [type=range]');
row.value = (Number(row.value) + 1) % (Number(row.max) + 1); row.dispatchEvent(new Event('input'));"""
NEW = """const field = document.getElementById('c-engine.num_blocks'); field.value = Number(field.value) + 1;
field.dispatchEvent(new Event('change'));"""
STATE = "const d = document.documentElement.dataset; return d.changes && d[arguments[0]] === d.changes"
TIMES = "return performance.getEntriesByName('picture').map(entry => entry.duration)"


def main(changes: int = 40) -> None:
    """Print the median and the 90th percentile of both."""
    Path("explore.yaml").write_text(SCENARIO, encoding="utf-8")
    browser = open_browser(1400, "light")
    with servesim.explore("explore.yaml") as page:
        browser.get(page.url)
        for name, mark in (("single changes", "done"), ("moving slider", "shown")):
            wait(browser, "done")
            browser.execute_script("performance.clearMeasures()")
            times: list[float] = []
            for number in range(changes):
                if number % 12 == 0:  # before the slider starts again: other scenarios
                    browser.execute_script(NEW)
                    wait(browser, "done")
                    browser.execute_script("performance.clearMeasures()")
                browser.execute_script(MOVE)
                wait(browser, mark)
                times.append(browser.execute_script(TIMES)[-1])
            q90 = statistics.quantiles(times, n=10)[-1]
            print(
                f"{name}: median {statistics.median(times):.0f} ms, P90 {q90:.0f} ms of {changes} changes", flush=True
            )
    browser.quit()
    Path("explore.yaml").unlink()


def wait(browser: object, mark: str) -> None:
    """Wait until the last change is drawn (shown) or complete (done)."""
    while not browser.execute_script(STATE, mark):  # type: ignore[attr-defined]
        time.sleep(0.005)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
