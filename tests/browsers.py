"""Headless Chromium for tests, which waits as long as a busy machine needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from .events import PATIENCE_S, wait_until

FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "hide-scrollbars",
)  # fmt: skip


@contextmanager
def open_browser() -> Iterator[Any]:
    """Start Chromium; skip the test if it is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium to drive a browser")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs chromium and chromedriver (Debian: chromium chromium-driver)")

    class Service(webdriver.ChromeService):  # type: ignore[misc, name-defined]
        def start(self) -> None:
            """Start the driver and wait for it: selenium itself gives up after 30 s."""
            self._start_process(self._path)
            wait_until(lambda: self.assert_process_still_running() or self.is_connectable(), "chromedriver")

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("browserStartupTimeout", 1000 * int(PATIENCE_S))
    running = webdriver.Chrome(options=options, service=Service(executable_path=driver))
    running.set_page_load_timeout(PATIENCE_S)
    running.set_script_timeout(PATIENCE_S)
    try:
        yield running
    finally:
        running.quit()
