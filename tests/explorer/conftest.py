"""Servers of the page: one in this process, and a headless browser on it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servesim
import yaml
from servesim.explorer.notebook import Explorer
from servesim.explorer.server import ExploreServer
from servesim.explorer.state import Origin

from ..events import PATIENCE_S

CONTEST = {  # the contest's server and requests, with fewer requests than in the contest
    "preset": "contest-baseline",
    "profile": "ascend910b4-llama2-7b",
    "workload": {"contest": {"X": 4, "T": 60}},
    "policy": {"decode_batch": 16, "delay_variant": "queue"},
    "engine": {"num_blocks": 200, "prefill_buckets": [520]},
    "slo": {"ttft": 5000, "tpot": 200},
}


def post(url: str, path: str, body: Any, headers: Any = None) -> tuple[int, str]:
    """Return the status and the text of the answer to a request; `body` is sent as JSON, bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def start(file: Path) -> ExploreServer:
    """Return a started server of a scenario file."""
    origin = Origin(str(file))
    return ExploreServer(origin, origin.first_state(), jobs=2).start()


@pytest.fixture(scope="session")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a short contest scenario."""
    file = tmp_path_factory.mktemp("explore") / "contest.yaml"
    file.write_text(yaml.safe_dump(CONTEST), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def vllm() -> Iterator[Explorer]:
    """A page without a file."""
    with servesim.explore(jobs=2) as explorer:
        yield explorer


@pytest.fixture(scope="session")
def server(scenario: Path) -> Iterator[ExploreServer]:
    """Return a server of the page."""
    running = start(scenario)
    yield running
    running.stop()
