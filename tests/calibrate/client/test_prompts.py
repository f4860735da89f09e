"""Prompts of the HTTP clients have the requested number of tokens, and share only what the trace shares."""

from __future__ import annotations

import pytest
from servesim.calibrate.client.prompts import WORDS, Prompts, new_seed
from servesim.calibrate.client.protocols import LlmServing, OpenAI
from servesim.core import Request
from servesim.core.content import content_of_ids, content_of_pieces

from .vocabularies import count_llama_tokens, count_sentencepiece_tokens

LENGTHS = (2, 3, 17, 100, 900, 2000)


def llm_serving_texts() -> list[str]:
    api = LlmServing(Prompts("seed"))
    return [api.body(Request(id, 0.0, length, 4))["inputs"] for id, length in enumerate(LENGTHS)]


def test_prompts_have_the_requested_length_in_the_vocabulary_of_llama() -> None:
    assert count_llama_tokens(["the", "w5709"]) == [2, 6]  # BOS, then one token and five tokens
    assert count_llama_tokens(llm_serving_texts()) == list(LENGTHS)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_prompts_have_the_requested_length_in_a_sentencepiece_vocabulary(kind: str) -> None:
    assert count_sentencepiece_tokens(["the", "w5709"], kind) == [2, 6]  # BOS, then one token and five tokens
    assert count_sentencepiece_tokens(llm_serving_texts(), kind) == list(LENGTHS)


def test_token_ids_have_the_exact_length() -> None:
    for length in LENGTHS:
        ids = OpenAI("model").body(Request("x", 0.0, length, 4))["prompt"]
        assert len(ids) == length
        assert min(ids) >= 100
        assert max(ids) < 1000


@pytest.mark.parametrize("vocabulary", [150, 256, 999, 5000])
def test_token_ids_are_in_the_vocabulary_of_the_model(vocabulary: int) -> None:
    """vLLM's engine ends if one is not."""
    ids = Prompts("1", vocabulary).token_ids(Request("x", 0.0, 5000, 4))
    assert max(ids) < vocabulary and len(set(ids)) > 100


def common_start(first: list[int], second: list[int]) -> int:
    """Return the number of equal tokens at the start."""
    pairs = enumerate(zip(first, second))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def test_no_two_of_5000_requests_begin_with_the_same_block() -> None:
    requests = [Request(id, 0.0, 40, 1) for id in range(5000)]
    for seed in ("", "1", "2"):
        prompts = Prompts(seed)
        assert len({tuple(prompts.token_ids(request)[:16]) for request in requests}) == len(requests)
        assert len({tuple(prompts.words(request).split()[:16]) for request in requests}) == len(requests)


def test_equal_seeds_give_equal_prompts_and_new_seeds_give_new_ones() -> None:
    request = Request("x", 0.0, 500, 1)
    again = Request("x", 7.0, 500, 9)
    assert Prompts("a").token_ids(request) == Prompts("a").token_ids(again)
    assert Prompts("a").words(request) == Prompts("a").words(again)
    assert common_start(Prompts("a").token_ids(request), Prompts("b").token_ids(request)) < 4
    assert new_seed() != new_seed()


def test_prompts_share_the_texts_of_their_contents_and_nothing_else() -> None:
    prompts = Prompts("seed")
    first = Request(0, 0.0, 300, 1, content=content_of_ids((7, 8, 9, 10, 11), 64, 300))
    second = Request(1, 0.0, 280, 1, content=content_of_ids((7, 8, 3, 4, 5), 64, 280))
    partial = Request(2, 0.0, 280, 1, content=content_of_pieces([(7, 64), ("7", 216)]))  # 7 and "7" are two texts
    ids = [prompts.token_ids(request) for request in (first, second, partial)]
    assert [len(one) for one in ids] == [300, 280, 280]
    assert 128 <= common_start(ids[0], ids[1]) < 132
    assert 64 <= common_start(ids[0], ids[2]) < 68
    assert common_start(ids[0], Prompts("other").token_ids(first)) < 4
    texts = [prompts.words(request).split() for request in (first, second)]
    assert texts[0][:128] == texts[1][:128]
    assert texts[0][128:144] != texts[1][128:144]


def test_a_piece_is_the_beginning_of_its_text() -> None:
    pieces = [[("a", 20), ("b", 10)], [("a", 30)], [("b", 5), ("a", 25)]]
    ids = [Prompts().token_ids(Request(k, 0.0, 30, 1, content=content_of_pieces(p))) for k, p in enumerate(pieces)]
    assert common_start(ids[0], ids[1]) == 20
    assert ids[2][:5] == ids[0][20:25] and ids[2][5:] == ids[1][:25]


def test_unusual_names_are_accepted() -> None:
    assert len(Prompts().token_ids(Request("\ud800", 0.0, 20, 1))) == 20
    strange = content_of_pieces([("\ud800", 3), (2**70, 16), ((1, "x"), 1)])
    assert len(Prompts().token_ids(Request(0, 0.0, 20, 1, content=strange))) == 20
    assert len(set(WORDS)) == len(WORDS)
