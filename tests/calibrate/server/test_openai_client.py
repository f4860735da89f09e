"""The openai Python client works with `sim serve` as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("aiohttp")
openai = pytest.importorskip("openai", reason="the openai client is not installed: pip install '.[dev]' in the clone")

from .serving import service  # noqa: E402

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is new today"}]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with service(api_key="s3cret") as served:
        yield f"http://127.0.0.1:{served.port}/v1"


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=address, api_key="s3cret", max_retries=0) as found:
        yield found


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").object == "model"


def test_chat(client: Any) -> None:
    found = client.chat.completions.create(model="fake", messages=MESSAGES, n=2, max_completion_tokens=6)
    assert [len(choice.message.content.split()) for choice in found.choices] == [6, 6]
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (6, 12)
    assert client.chat.completions.create(model="fake", messages=MESSAGES).choices[0].finish_reason == "stop"


def test_streamed_chat(client: Any) -> None:
    options = {"include_usage": True}
    whole = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=6)
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=6, stream=True, stream_options=options
    )
    *pieces, last = list(stream)
    assert "".join(piece.choices[0].delta.content for piece in pieces) == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage == whole.usage


def test_errors_are_those_of_openai(client: Any, address: str) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `gpt-4` does not exist") as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="max_tokens: expected an integer of at least 1"):
        client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=-1)
    with (
        openai.OpenAI(base_url=address, api_key="other", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()
