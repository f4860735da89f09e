"""`sim serve`: OpenAI's completions and chat as clients of vLLM use them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any, Optional

import pytest

pytest.importorskip("aiohttp")

from servesim.calibrate.server.engine_process import EngineLoop
from servesim.calibrate.server.service import Service

from .serving import ENDLESS, ENGINE, ask, gather_bursts, idle_state, post, raw, service, wait_for_state

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello there"}]
USUAL = 30  # tokens of an answer without a limit
LONGEST = ENGINE["max_model_len"] - 1  # llm-serving rejects prompt + limit = max_model_len


@pytest.fixture(scope="module")
def shared_service() -> Iterator[Service]:
    with service(names=("first", "second")) as served:
        yield served


def answer(served: Service, path: str, body: dict[str, Any], status: int = 200) -> Any:
    got, data = ask(served, path, body)
    assert got == status, data
    return json.loads(data)


def lines(served: Service, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the JSON values of a stream, which must end with [DONE]."""
    status, data = ask(served, path, {**body, "stream": True})
    assert status == 200, data
    found = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line]
    assert found.pop() == b"[DONE]"
    return [json.loads(line) for line in found]


def test_a_chat_has_one_message_and_counts_the_words_of_all_messages(shared_service: Service) -> None:
    parts = [{"type": "text", "text": "three more words"}, {"type": "text", "text": "and two"}]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": parts},
    ]
    found = answer(shared_service, CHAT, {"model": "first", "messages": messages, "max_tokens": 4})
    assert found["object"] == "chat.completion"
    assert found["model"] == "first"
    [choice] = found["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    text = choice["message"]["content"]
    assert len(text.split(" ")) == 4  # no space at the start
    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}


def test_the_lines_of_a_chat_give_the_same_text(shared_service: Service) -> None:
    body = {"messages": HELLO, "max_completion_tokens": 5}
    text = answer(shared_service, CHAT, body)["choices"][0]["message"]["content"]
    found = lines(shared_service, CHAT, body)
    assert len(found) == 5  # one line per token: the times of lines are the times of tokens
    assert {line["object"] for line in found} == {"chat.completion.chunk"}
    assert len({(line["id"], line["created"]) for line in found}) == 1
    deltas = [line["choices"][0]["delta"] for line in found]
    assert [delta.get("role") for delta in deltas] == ["assistant", None, None, None, None]
    assert "".join(delta["content"] for delta in deltas) == text
    assert [line["choices"][0]["finish_reason"] for line in found] == [None] * 4 + ["length"]


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (None, [None] * 3),
        ({"include_usage": True}, [None] * 3 + [3]),
        ({"include_usage": True, "continuous_usage_stats": True}, [1, 2, 3, 3]),
        ({"include_usage": None}, [None] * 3),
    ],
)
def test_a_stream_has_the_token_counts_that_it_asks_for(
    shared_service: Service, options: Any, counts: list[Optional[int]]
) -> None:
    found = lines(shared_service, CHAT, {"messages": HELLO, "max_tokens": 3, "stream_options": options})
    assert [(line.get("usage") or {}).get("completion_tokens") for line in found] == counts


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({"max_tokens": None}, USUAL, "stop"),
        ({"max_tokens": None, "min_tokens": 50}, 50, "stop"),
        ({"max_tokens": None, "ignore_eos": True}, LONGEST - 2, "length"),
        ({"max_tokens": 40, "ignore_eos": True, "min_tokens": 40}, 40, "length"),
        ({"max_tokens": 100_000}, LONGEST - 2, "length"),
    ],
)
def test_the_length_of_an_answer(
    shared_service: Service, path: str, fields: dict[str, Any], tokens: int, reason: str
) -> None:
    found = answer(shared_service, path, {"messages": HELLO, "prompt": "hello there", **fields})
    assert found["usage"]["completion_tokens"] == tokens
    assert found["choices"][0]["finish_reason"] == reason


def test_without_a_limit_a_chat_is_longer_than_a_completion(shared_service: Service) -> None:
    assert answer(shared_service, CHAT, {"messages": HELLO})["usage"]["completion_tokens"] == USUAL
    assert answer(shared_service, COMPLETIONS, {"prompt": "x"})["usage"]["completion_tokens"] == 16


def test_an_answer_without_a_limit_fits_into_the_blocks() -> None:
    with service(policy={"name": "vllm"}, engine={"num_blocks": 6, "max_model_len": 64}) as served:
        found = answer(served, CHAT, {"messages": HELLO, "ignore_eos": True})
        assert found["usage"]["completion_tokens"] == 6 * 8 - 2
        assert answer(served, CHAT, {"messages": HELLO})["usage"]["completion_tokens"] == USUAL
        assert "error" in answer(served, CHAT, {"messages": HELLO, "max_tokens": 60}, 400)


def test_several_prompts_with_several_answers_are_joined_by_index(shared_service: Service) -> None:
    single = [
        answer(shared_service, COMPLETIONS, {"prompt": prompt, "max_tokens": 6})["choices"][0]["text"]
        for prompt in ("a b c", "d")
    ]
    assert single[0] != single[1]
    body = {"prompt": ["a b c", "d"], "n": 2, "max_tokens": 6}
    found = answer(shared_service, COMPLETIONS, body)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in found["choices"]] == [single[0], single[0], single[1], single[1]]
    assert found["usage"] == {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28}
    texts = dict.fromkeys(range(4), "")
    for line in lines(shared_service, COMPLETIONS, body):
        for choice in line["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [single[0], single[0], single[1], single[1]]
    ids = answer(shared_service, COMPLETIONS, {"prompt": [[5, 6], [7]], "max_tokens": 2})
    assert len(ids["choices"]) == 2
    assert ids["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("streamed", [False, True])
def test_one_prompt_that_cannot_fit_rejects_the_whole_request(shared_service: Service, streamed: bool) -> None:
    body = {"prompt": ["x", "x " * 500], "max_tokens": 50, "stream": streamed}
    error = answer(shared_service, COMPLETIONS, body, 400)["error"]
    assert error["message"] == "prompt: expected at most 200 tokens (the context), got 500"
    state = idle_state(shared_service)
    assert state["open"] == 0
    assert state["free_blocks"] == state["total_blocks"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_disconnect_aborts_all_answers(streamed: bool) -> None:
    with service(engine=ENDLESS) as served:
        body = {"messages": HELLO, "n": 5, "max_tokens": 50_000, "stream": streamed}
        client = raw(served, post(body, CHAT))
        wait_for_state(served, lambda state: state["running"] == 5, "five running requests")
        client.close()
        state = idle_state(served)
        assert state["open"] == state["running"] == 0
        assert state["free_blocks"] == state["total_blocks"]
        assert state["served"] == 0


def test_a_request_gets_all_its_answers_or_a_503() -> None:
    with service(queue=4, engine=ENDLESS) as served:
        assert answer(served, CHAT, {"messages": HELLO, "n": 4, "max_tokens": 2})["choices"][3]["index"] == 3
        client = raw(served, post({"prompt": "x", "max_tokens": 50_000, "stream": True}, COMPLETIONS))
        wait_for_state(served, lambda state: state["open"] == 1, "an open request")
        found = answer(served, CHAT, {"messages": HELLO, "n": 4, "max_tokens": 2}, 503)
        assert found["error"]["message"] == "1 requests are open already; the maximum is 4"
        assert json.loads(ask(served, "/serving/state")[1])["open"] == 1
        too_many = answer(served, COMPLETIONS, {"prompt": ["x"] * 5, "max_tokens": 2}, 400)
        assert "at most 4 answers" in too_many["error"]["message"]
        client.close()


def test_the_model_has_the_given_names_and_no_other(shared_service: Service) -> None:
    models = answer(shared_service, "/v1/models", None)["data"]  # type: ignore[arg-type]
    assert [model["id"] for model in models] == ["first", "second"]
    assert answer(shared_service, CHAT, {"model": "second", "messages": HELLO, "max_tokens": 1})["model"] == "first"
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        error = answer(shared_service, path, {"model": "gpt-4", **body}, 404)["error"]
        assert error["message"].startswith("The model `gpt-4` does not exist")
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")
    assert ask(shared_service, "/v1/models/second")[0] == 200
    assert ask(shared_service, "/v1/models/gpt-4")[0] == 404


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {}, "messages: expected a list of messages, not empty"),
        (CHAT, {"messages": []}, "messages: expected a list of messages, not empty"),
        (CHAT, {"messages": ["hi"]}, "messages[0]: expected an object with role and content"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages: expected a text that is not empty"),
        (
            CHAT,
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[1].content: expected a text or a list of text parts",
        ),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content: expected a text or a list"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens: expected an integer of at"),
        (CHAT, {"messages": HELLO, "max_tokens": True}, "max_tokens: expected an integer of at least 1, got True"),
        (CHAT, {"messages": HELLO, "n": 1.5}, "n: expected an integer from 1 to 1000, got 1.5"),
        (CHAT, {"messages": HELLO, "logprobs": True}, "logprobs: not supported, expected null or false, got True"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice: not supported, expected none or auto"),
        (CHAT, {"messages": HELLO, "tool_choice": {"type": "function"}}, "tool_choice: not supported, expected none"),
        (CHAT, {"messages": HELLO, "model": 3}, "model: expected a name"),
        (COMPLETIONS, {"prompt": "x", "echo": True}, "echo: not supported, expected null or false, got True"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 3, "min_tokens": 4}, "min_tokens: expected at most max_tokens (3)"),
        (COMPLETIONS, {"prompt": ["x", 3]}, "prompt: expected a text or a list of token ids, not empty"),
        (COMPLETIONS, {"prompt": ["x", ""]}, "prompt: expected a text or a list of token ids, not empty"),
        (COMPLETIONS, {"prompt": []}, "prompt: expected a text or a list of token ids, not empty"),
        (COMPLETIONS, {"prompt": [[[1]]]}, "prompt: expected a text or a list of token ids, not empty"),
        (COMPLETIONS, {"prompt": "x " * 10_000, "n": 1000}, "n: expected at most 1048576 prompt tokens in total"),
        ("/detokenize", {"tokens": []}, "tokens: expected a list of token ids, not empty"),
        ("/detokenize", {"tokens": [10**9]}, "tokens: expected token ids below 32000"),
        ("/tokenize", {"prompt": [1]}, "prompt: expected a text"),
    ],
)
def test_wrong_fields_are_a_400_with_one_message(
    shared_service: Service, path: str, body: dict[str, Any], message: str
) -> None:
    error = answer(shared_service, path, body, 400)["error"]
    assert error["message"].startswith(message)
    assert error["type"] == "invalid_request_error"
    assert idle_state(shared_service)["open"] == 0


def test_fields_without_an_effect_are_accepted(shared_service: Service) -> None:
    fields = {
        "temperature": 0.0, "top_p": 1, "stop": None, "seed": 1, "logprobs": None, "echo": False, "best_of": 1,
        "repetition_penalty": 1.0, "user": "me", "suffix": None, "unknown": {"a": 1}, "min_tokens": None, "n": None,
        "tools": [{"type": "function", "function": {"name": "weather"}}], "tool_choice": "auto",
    }  # fmt: skip
    for path in (CHAT, COMPLETIONS):
        found = answer(shared_service, path, {"messages": HELLO, "prompt": "x", "max_tokens": 2, **fields})
        assert found["usage"]["completion_tokens"] == 2


def test_tokens_of_a_text_and_back(shared_service: Service) -> None:
    found = answer(shared_service, "/tokenize", {"prompt": "great water w17"})
    assert found["count"] == len(found["tokens"]) == 3
    assert found["max_model_len"] == ENGINE["max_model_len"]
    text = answer(shared_service, "/detokenize", {"tokens": found["tokens"]})["prompt"]
    assert text.startswith("great water ")
    assert answer(shared_service, "/tokenize", {"messages": HELLO})["count"] == 2


def test_health_and_version(shared_service: Service) -> None:
    assert [ask(shared_service, path)[0] for path in ("/health", "/ping")] == [200, 200]
    assert set(answer(shared_service, "/version", None)) == {"version"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"priority": 5}, "priority"),
        ({"priority": -1}, "priority"),
        ({"priority": 1e30}, "priority"),
        ({"priority": True}, "priority"),
        ({"best_of": 5}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 1.5}, "best_of"),
        ({"priority": 0, "best_of": 1}, None),
        ({"priority": None, "best_of": None}, None),
        ({"best_of": 2, "n": 2}, None),
    ],
)
def test_a_priority_or_further_answers_that_have_no_effect_are_refused(
    shared_service: Service, fields: dict[str, Any], wrong: Optional[str]
) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a b"}), (CHAT, {"messages": HELLO})):
        found = answer(shared_service, path, {**prompt, "max_tokens": 1, **fields}, 400 if wrong else 200)
        assert found.get("error", {}).get("param") == wrong


@pytest.mark.parametrize("field", ["policy", "order"])
def test_a_policy_with_priorities_obeys_them(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []  # numbers of the requests, from 1, in the order in which the engine ends them
    send_message = EngineLoop._send

    def note_ends(engine: EngineLoop, tokens: Any, finished: Any) -> None:
        ended.extend(id for id, *_ in finished)
        send_message(engine, tokens, finished)

    monkeypatch.setattr(EngineLoop, "_send", note_ends)
    gather_bursts(monkeypatch, 4)
    priorities, threads = (-9, 5, 1, -3), []
    policy = {"name": "vllm-v1", "max_num_seqs": 1, field: "priority"}
    with service(policy=policy) as served:
        for count, priority in enumerate(priorities, 1):
            body = {"prompt": "a b", "max_tokens": 10, "priority": priority}
            threads.append(threading.Thread(target=answer, args=(served, COMPLETIONS, body)))
            threads[-1].start()
            if count < len(priorities):  # the engine starts when it has the last one, and may end all at once
                wait_for_state(served, lambda state, count=count: state["open"] == count, f"{count} open requests")
        for thread in threads:
            thread.join()
    assert [priorities[number - 1] for number in ended] == [-9, -3, 1, 5]
