"""The site of docs/: built in strict mode, opened from its folder without a network."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ..conftest import ROOT
from ..events import wait_until

MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not MKDOCS.exists():
        pytest.skip("needs the environment of `make docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [str(MKDOCS), "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert '<script src="http' not in text and 'rel="stylesheet" href="http' not in text, page.name


def test_search_finds_a_page_without_a_network(site: Path, browser: Any) -> None:
    browser.get((site / "limits.html").as_uri())
    browser.execute_script("document.querySelector('label[for=__search]').click()")
    browser.execute_script("""
        const field = document.querySelector("input.md-search__input")
        field.focus(); field.value = "kendall"; field.dispatchEvent(new Event("keyup", {bubbles: true}))
    """)
    found = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    wait_until(lambda: any("accuracy.html" in link for link in browser.execute_script(found)), "the page")


def test_a_file_outside_docs_that_a_page_links_is_a_part_of_the_site(site: Path) -> None:
    assert "max_batch_tokens" in (site / "files" / "examples" / "hf_fifo.py.html").read_text(encoding="utf-8")
    assert (site / "files" / "benchmarks" / "results" / "proof.csv").is_file()
