"""Take the picture of docs/explore.md in Chromium: python tools/explore_picture.py [WIDTH] [light|dark] [FILE]"""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

import servesim
from PIL import Image
from selenium import webdriver

ROOT = Path(__file__).resolve().parents[1]
SCENARIO = """\
preset: contest-baseline
profile: ascend910b4-llama2-7b
workload: {contest: {X: 4, T: 375}}
policy: {decode_batch: 16, delay_variant: queue}
engine: {num_blocks: 200, prefill_buckets: [520]}
slo: {ttft: 5000, tpot: 200}
"""
STATE = {
    "settings": {"policy.decode_batch": "32"},
    "pins": [{}, {"settings": {"policy.decode_batch": "48", "policy.preempted_to": "swapped"}}],
    "replications": 5,
}


def open_browser(width: int, scheme: str) -> Any:
    """Return a browser with a window of this width."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    browser = webdriver.Chrome(options=options, service=service)
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    return browser


def main(width: int, scheme: str = "light", file: str = "") -> None:
    """Write the picture of the whole page."""
    target = Path(file) if file else ROOT / "docs" / "pictures" / "explore.png"
    Path("best.yaml").write_text(SCENARIO, encoding="utf-8")
    browser = open_browser(width, scheme)
    with servesim.explore("best.yaml") as page:
        browser.get(f"{page.url}#{urllib.parse.quote(json.dumps(STATE))}")
        while not browser.execute_script("return document.documentElement.dataset.done"):
            time.sleep(0.2)
        height = browser.execute_script("return document.querySelector('main').scrollHeight")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        time.sleep(1)  # until the charts have their new size
        picture = Image.open(io.BytesIO(browser.get_screenshot_as_png()))
    browser.quit()
    Path("best.yaml").unlink()
    picture.convert("RGB").quantize(128).save(target, optimize=True)
    print(f"wrote {target}: {target.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    words = sys.argv[1:]
    main(int(words[0]) if words else 1400, *words[1:])
