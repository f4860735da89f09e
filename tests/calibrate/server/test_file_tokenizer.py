"""`sim serve --tokenizer`: prompts have the tokens of a tokenizer file, in every interface."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
tokenizers = pytest.importorskip("tokenizers")

from servesim.calibrate.server.service import Service  # noqa: E402
from servesim.calibrate.server.tokenizers import FileTokenizer  # noqa: E402

from ...events import PATIENCE_S  # noqa: E402
from .serving import ask, service  # noqa: E402

TEXT = "the weather, today"  # 5 tokens: `weather` is two, the comma is one
WORDS = ("the", "weat", "##her", ",", "today", "rain")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a WordPiece tokenizer. Most of its ids are larger than the vocabulary of the served model."""
    ids = {"[UNK]": 3, **{word: 50_000 + place for place, word in enumerate(WORDS)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("[UNK] $A", special_tokens=[("[UNK]", 3)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def served(file: Path) -> Iterator[Service]:
    with service(tokenizer=FileTokenizer(str(file.parent))) as each:
        yield each


def count(served: Service, path: str, body: Any) -> int:
    """Return the prompt tokens that the server reports."""
    status, answer = ask(served, path, {**body, "max_tokens": 2})
    assert status == 200, answer
    return int(json.loads(answer)["usage"]["prompt_tokens"])


def test_prompts_have_the_tokens_of_the_file(served: Service) -> None:
    assert count(served, "/v1/completions", {"prompt": TEXT}) == 5
    assert count(served, "/v1/completions", {"prompt": [TEXT, "rain rain"]}) == 7
    messages = [{"role": "system", "content": "rain"}, {"role": "user", "content": TEXT}]
    assert count(served, "/v1/chat/completions", {"messages": messages}) == 6
    assert count(served, "/v1/completions", {"prompt": [50_000, 50_005, 3]}) == 3  # ids that the client made


def test_llm_serving_adds_one_token_to_those_of_the_file(served: Service) -> None:
    limit = 200 - 1 - 6  # the context, and the policy needs one token less
    for tokens, reason in ((limit, "length"), (limit + 1, "prompt_out_of_range")):
        body = {"inputs": TEXT, "parameters": {"max_new_tokens": tokens}}
        _, answer = ask(served, "/models/llama2/generate", body)
        assert json.loads(answer)["finish_reason"] == reason


def test_tokenize_and_detokenize_use_the_file(served: Service) -> None:
    _, answer = ask(served, "/tokenize", {"prompt": TEXT})
    tokens = json.loads(answer)["tokens"]
    assert tokens == [50_000, 50_001, 50_002, 50_003, 50_004]
    assert json.loads(ask(served, "/detokenize", {"tokens": tokens})[1])["prompt"] == TEXT
    status, answer = ask(served, "/detokenize", {"tokens": [50_006]})
    assert (status, json.loads(answer)["error"]["message"]) == (400, "tokens: expected token ids below 50006")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}),
        ("/models/llama2/generate", {"inputs": TEXT, "parameters": {"max_new_tokens": 2}}),
        ("/tokenize", {"prompt": TEXT}),
    ],
)
def test_other_clients_are_served_while_a_prompt_is_encoded(file: Path, path: str, body: Any) -> None:
    started, go_on = threading.Event(), threading.Event()

    class Waiting(FileTokenizer):
        def encode(self, text: str) -> list[int]:
            started.set()
            assert go_on.wait(PATIENCE_S)
            return super().encode(text)

    with service(tokenizer=Waiting(str(file))) as served, ThreadPoolExecutor() as pool:
        try:
            answer = pool.submit(ask, served, path, body)
            assert started.wait(PATIENCE_S)
            assert ask(served, "/v1/completions", {"prompt": [3], "max_tokens": 5})[0] == 200
            assert not answer.done()
        finally:
            go_on.set()
        assert answer.result(PATIENCE_S)[0] == 200


def test_a_text_that_the_tokenizer_cannot_encode_is_a_400(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"hello": 1}, unk_token="none")).save(str(path))
    with service(tokenizer=FileTokenizer(str(path))) as served:
        status, answer = ask(served, "/v1/completions", {"prompt": "goodbye"})
    assert status == 400
    assert json.loads(answer)["error"]["message"].startswith("the tokenizer of this server cannot encode the text: ")
