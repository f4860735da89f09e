"""Prompts of `sim calibrate endpoint` have the requested length, also as text with a BOS token."""

from __future__ import annotations

from typing import Optional

import pytest

pytest.importorskip("aiohttp")
from servesim.calibrate.client.load_generator import SentRequest
from servesim.calibrate.client.protocols import TextCompletions
from servesim.calibrate.endpoint.load_plan import Design, ServerSpeed
from servesim.calibrate.endpoint.measure import added_tokens, detect_api
from servesim.core import BadInput, Request

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


def test_the_default_lengths_fit_into_the_max_model_len_of_the_server() -> None:
    models = [{"id": "other", "max_model_len": 512}, {"id": "m", "max_model_len": 2048}]
    with recording_server(models=models) as server:
        assert detect_api(server.url, "openai", None, 10.0, "seed").max_length == 512
        client = detect_api(server.url, "openai", "m", 10.0, "seed")
    assert client.max_length == 2048
    design = Design().within(client.max_length, chosen=False)
    assert design.lengths == (16, 32, 64, 128, 256, 512, 1024, 2016)
    for point in design.points():
        requests = point.requests("seed", design.output, design.short_prompt, ServerSpeed())
        assert max(request.prompt + request.output for request in requests) <= 2048
    assert Design().within(None, chosen=False) == Design()
    assert Design().within(1000, chosen=False).lengths[-2:] == (512, 968)


def test_chosen_lengths_above_the_limit_of_the_server_are_an_error() -> None:
    assert Design(lengths=(16, 2016)).within(2048, chosen=True).lengths == (16, 2016)
    with pytest.raises(BadInput, match="expected at most 2048 tokens of prompt and output, the max_model_len"):
        Design(lengths=(16, 2048)).within(2048, chosen=True)
    with pytest.raises(BadInput, match="expected at most 64 tokens"):
        Design().within(64, chosen=False)
