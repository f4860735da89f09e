"""Prompts of `sim calibrate endpoint` have the requested length, also as text with a BOS token."""

from __future__ import annotations

from typing import Optional

import pytest

pytest.importorskip("aiohttp")
from servesim.calibrate.client.load_generator import SentRequest
from servesim.calibrate.client.protocols import TextCompletions
from servesim.calibrate.endpoint.measure import added_tokens, detect_api
from servesim.core import Request

from ..client.recording_server import recording_server


@pytest.mark.parametrize(("added", "words"), [(1, 99), (0, 100), (None, 100)])
def test_a_text_prompt_is_shorter_by_the_tokens_that_the_server_adds(added: Optional[int], words: int) -> None:
    with recording_server(added, text_only=True) as server:
        client = detect_api(server.url, "openai", "m", 10.0, "seed")
        assert isinstance(client.api, TextCompletions)
        client.send([Request("x", 0.0, 100, 1)])
    assert len(server.prompts[-1]) == words


@pytest.mark.parametrize(("counted", "added"), [(None, 0), (15, 0), (16, 0), (18, 2), (80, 0)])
def test_only_a_small_difference_is_taken_as_added_tokens(counted: Optional[int], added: int) -> None:
    assert added_tokens(SentRequest(Request("x", 0.0, 16, 1), 0.0, prompt_tokens=counted)) == added
