"""MindFormers' paged Llama on MindSpore, on a CPU: tokens, cache, graphs, and the framework behaviour they rely on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servesim.calibrate.device.backend import MODELS, Model, Row
from servesim.calibrate.device.kbk.mindspore_setup import random_weight
from servesim.core import BadInput

from .kbk_host import kbk_python, run_contract
from .stepping_worker import SteppingWorker

pytestmark = [pytest.mark.kbk, pytest.mark.timeout(1800)]

GROUPED = Model("grouped", 2, 64, 4, 2, 176, 256, 512)  # micro, with heads that share keys and values
BLOCKS = {"blocks": 64, "block_size": 16, "host_blocks": 40}
ASCEND_ONLY = ("ApplyRotaryPosEmb", "ReshapeAndCache", "PagedAttention", "FlashAttentionScore", "RmsNorm")
TOLERANCE = 1e-5  # of a logit, relative to the largest one


class Timed(SteppingWorker):
    """A worker with the load time of its model."""

    load_seconds = 0.0


@pytest.fixture(scope="module")
def graph() -> Iterator[Timed]:
    """A model with grouped heads in graph mode, the default on a CPU."""
    with Timed("kbk", python=kbk_python()) as worker:
        start = time.perf_counter()
        worker.load(GROUPED, **BLOCKS)
        worker.load_seconds = time.perf_counter() - start
        yield worker


@pytest.fixture(scope="module")
def eager() -> Iterator[SteppingWorker]:
    """A micro model without graphs (no compilation), on one thread."""
    with SteppingWorker("kbk", python=kbk_python(), mode="pynative", threads=1) as worker:
        worker.load("micro", **BLOCKS)
        yield worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with other weights than the backend's, for the section `checkpoint` of kbk_contract.py."""
    folder = tmp_path_factory.mktemp("contract")
    np.savez(folder / "weights.npz", **other_weights())
    return folder


@pytest.fixture(scope="module")
def contract(folder: Path) -> dict[str, Any]:
    """Results of kbk_contract.py: behaviour of the frameworks without the backend."""
    return run_contract(folder, "synchronize", "signatures", "unpatched", "checkpoint")


@pytest.fixture(scope="module")
def self_tests(graph: Timed) -> list[dict[str, Any]]:
    """Results of three self-tests."""
    return [graph.call("exercise", seed=seed) for seed in range(3)]


def test_batches_that_grow_shrink_and_swap_match_a_pass_without_a_cache(self_tests: list[dict[str, Any]]) -> None:
    for result in self_tests:
        assert result["scores"] == 64
        assert result["differ"] == 0
        assert result["error"] < TOLERANCE


def test_self_tests_had_growing_and_shrinking_batches_chunks_and_swaps(self_tests: list[dict[str, Any]]) -> None:
    assert all(result["largest"] >= 4 and result["smallest"] == 1 for result in self_tests)
    assert sum(result["chunks"] for result in self_tests) >= 4
    assert sum(result["swaps"] for result in self_tests) >= 4


@pytest.mark.parametrize("seed", range(2))
def test_one_wrong_block_table_changes_the_logits(graph: Timed, seed: int) -> None:
    result = graph.call("exercise", seed=seed, spoil=True)
    assert result["spoiled"] == 1
    assert result["error"] > 1000 * TOLERANCE


def test_the_pass_without_a_cache_is_a_llama(graph: Timed) -> None:
    """Both passes share most of MindFormers' code, so this one is compared with the llama_formulas in float64."""
    tokens = [0, 3, 200, 17, 17, 255, 1, 90, 41]
    logits = np.array(graph.call("plain", tokens=tokens))
    assert np.abs(logits - llama_formulas(GROUPED, tokens)).max() < TOLERANCE * np.abs(logits).max()


def test_new_shapes_compile_no_new_graph(graph: Timed) -> None:
    slowest = 0.0
    for rows in range(1, 10):
        length = 11 * rows
        table = list(range(1, 1 + -(-(length + 1) // 16)))
        graph.step([Row([7] * length, 0, table)] * rows)
        slowest = max(slowest, graph.seconds)
        graph.step([Row([7], length, table)] * rows)
        slowest = max(slowest, graph.seconds)
    assert graph.describe()["graphs"] == 2  # one for prompts, one for the cache
    assert slowest < graph.load_seconds / 4


def test_tokens_have_the_order_of_the_rows(graph: Timed) -> None:
    first, second, third = Row([5, 6, 7, 8], 0, [1]), Row([9, 10], 0, [2]), Row([4] * 20, 0, [3, 4])
    alone = [graph.step([row])[0] for row in (first, second, third)]
    later = graph.step([Row([alone[1]], 2, [2])])[0]
    graph.step([second])
    assert graph.step([third, Row([alone[1]], 2, [2]), first]) == [alone[2], later, alone[0]]


def test_a_prompt_of_one_token_and_padding_rows_run_with_the_decodes(graph: Timed) -> None:
    alone = graph.step([Row([5], 0, [1])])
    graph.step([Row([9, 10, 11], 0, [2])])
    decode = graph.step([Row([3], 3, [2])])
    padding = Row([1], 0, [0])
    assert graph.step([Row([3], 3, [2]), padding, Row([5], 0, [1]), padding])[0::2] == decode + alone


def test_swapped_in_blocks_keep_their_tokens_in_other_blocks(graph: Timed) -> None:
    prompt = [11] * 20 + [12] * 13
    graph.step([Row(prompt, 0, [5, 9, 2])])
    before = graph.step([Row([6], 33, [5, 9, 2])])
    graph.swap_out([(5, 1), (9, 39), (2, 0)])
    graph.step([Row([77] * 48, 0, [5, 9, 2])])
    assert graph.step([Row([6], 33, [5, 9, 2])]) != before
    graph.swap_in([(1, 30), (39, 31), (0, 7)])
    assert graph.step([Row([6], 33, [30, 31, 7])]) == before


def test_error_for_rows_and_swaps_that_do_not_fit(graph: Timed) -> None:
    with pytest.raises(BadInput, match=r"^row: 20 tokens after 0 cached ones in 1 blocks of 16, expected"):
        graph.step([Row([1] * 20, 0, [3])])
    with pytest.raises(BadInput, match=r"a length of at most 512$"):
        graph.step([Row([1], 512, list(range(33)))])
    with pytest.raises(BadInput, match=r"^row: block 64, expected a block below 64$"):
        graph.step([Row([1, 2], 0, [64])])
    with pytest.raises(BadInput, match=r"^swap: expected device blocks below 64 and host blocks below 40$"):
        graph.swap_out([(3, 40)])


def test_without_graphs_the_tokens_are_the_same(eager: SteppingWorker) -> None:
    result = eager.call("exercise", timeout=1500, prompts=[1, 17, 70], answer=4)
    assert (result["scores"], result["differ"]) == (12, 0)
    assert result["error"] < TOLERANCE
    assert eager.describe()["jit_level"] is None


def test_weights_can_be_read_from_checkpoints(eager: SteppingWorker, contract: dict[str, Any], folder: Path) -> None:
    """Must be the last test with this worker: it loads other weights."""
    other = other_weights()
    write_safetensors(folder / "micro.safetensors", other)
    renamed = [(hugging_face_name(name), value) for name, value in other.items()]
    (folder / "parts").mkdir()
    write_safetensors(folder / "parts" / "model-00001-of-00002.safetensors", dict(renamed[:9]))
    write_safetensors(folder / "parts" / "model-00002-of-00002.safetensors", dict(renamed[9:]))
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = llama_formulas(MODELS["micro"], tokens, seed_of=lambda name: "other " + name)
    for name in (contract["checkpoint"], "micro.safetensors", "parts"):
        eager.load("micro", **BLOCKS, weights=str(folder / name))
        eager.step([Row(tokens, 0, [1])])
        scores = np.array(eager.call("logits"))[0]
        assert np.abs(scores - expected[-1]).max() < TOLERANCE * np.abs(expected).max(), name
    with pytest.raises(BadInput, match=r"^weights: cannot read"):
        eager.load("micro", **BLOCKS, weights=str(folder / "none.ckpt"))
    with pytest.raises(BadInput, match=r"^weights: .* lacks 12 of the model's parameters"):
        eager.load("micro", **BLOCKS, weights=str(folder / "parts" / "model-00001-of-00002.safetensors"))


@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_the_unpatched_model_fails_only_at_kernel_selection(contract: dict[str, Any], call: str) -> None:
    failure = contract["unpatched"][call]
    assert failure.startswith("RuntimeError:")
    assert "Kernel select failed" in failure
    assert any(f"Unsupported op [{name}] on CPU" in failure for name in ASCEND_ONLY)


def test_framework_signatures_have_not_changed(contract: dict[str, Any]) -> None:
    stored = json.loads(Path(__file__).with_name("kbk_signatures.json").read_text())
    assert contract["signatures"] == stored


def test_only_a_primed_synchronize_waits_for_the_work(contract: dict[str, Any]) -> None:
    result = contract["synchronize"]
    waited, read = result["unprimed"]
    assert waited < read  # synchronize did not wait; reading the result did
    waited, read = result["primed"]
    assert waited > read


def other_weights() -> dict[str, Any]:
    """Return weights for the micro model that differ from the backend's random weights."""
    return {name: random_weight("other " + name, shape) for name, shape in shapes(MODELS["micro"]).items()}


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama's parameters by MindFormers' names."""
    hidden, keys, wide = model.hidden, model.hidden // model.heads * model.kv_heads, model.intermediate
    result: dict[str, tuple[int, ...]] = {"model.tok_embeddings.embedding_weight": (model.vocab, hidden)}
    for layer in range(model.layers):
        for name, shape in (
            ("attention.wq", (hidden, hidden)),
            ("attention.wk", (keys, hidden)),
            ("attention.wv", (keys, hidden)),
            ("attention.wo", (hidden, hidden)),
            ("feed_forward.w1", (wide, hidden)),
            ("feed_forward.w2", (hidden, wide)),
            ("feed_forward.w3", (wide, hidden)),
            ("attention_norm", (hidden,)),
            ("ffn_norm", (hidden,)),
        ):
            result[f"model.layers.{layer}.{name}.weight"] = shape
    return {**result, "model.norm_out.weight": (hidden,), "lm_head.weight": (model.vocab, hidden)}


def hugging_face_name(name: str) -> str:
    """Return Hugging Face's name of a parameter."""
    for mindformers, hugging_face in (
        ("tok_embeddings.embedding_weight", "embed_tokens.weight"),
        ("attention_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("norm_out", "norm"),
        *((f"attention.w{part}", f"self_attn.{part}_proj") for part in "qkvo"),
        *((f"feed_forward.w{k}", f"mlp.{part}_proj") for k, part in ((1, "gate"), (2, "down"), (3, "up"))),
    ):
        name = name.replace(mindformers, hugging_face)
    return name


def write_safetensors(path: Path, weights: dict[str, Any]) -> None:
    """Write a file of the safetensors format: the length of a JSON header, the header, the data."""
    header, start = {}, 0
    for name, value in weights.items():
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": [start, start + value.nbytes]}
        start += value.nbytes
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in weights.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def llama_formulas(model: Model, tokens: list[int], seed_of: Any = str) -> Any:
    """Return a Llama's logits after each token, from its random weights and the published formulas, in float64."""

    def weight(name: str, *shape: int) -> Any:
        return random_weight(seed_of(name), shape).astype(np.float64)

    def norm(x: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    size = model.hidden // model.heads
    angle = np.arange(len(tokens))[:, None] / 10000.0 ** (np.arange(0, size, 2) / size)
    cos, sin = np.tile(np.cos(angle), 2)[:, None], np.tile(np.sin(angle), 2)[:, None]

    def rotate(x: Any) -> Any:
        return x * cos + np.concatenate((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin

    x = weight("model.tok_embeddings.embedding_weight", model.vocab, model.hidden)[tokens]
    ahead = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for layer in range(model.layers):
        here = f"model.layers.{layer}."
        h = norm(x)
        q, k, v = (
            (h @ weight(f"{here}attention.w{part}.weight", heads * size, model.hidden).T).reshape(-1, heads, size)
            for part, heads in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads))
        )
        repeats = model.heads // model.kv_heads
        k, v = rotate(k).repeat(repeats, 1), v.repeat(repeats, 1)
        scores = np.einsum("qhd,khd->hqk", rotate(q), k) / np.sqrt(size) + ahead
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(len(tokens), -1)
        x = x + mixed @ weight(here + "attention.wo.weight", model.hidden, model.hidden).T
        h = norm(x)
        gate = h @ weight(here + "feed_forward.w1.weight", model.intermediate, model.hidden).T
        up = h @ weight(here + "feed_forward.w3.weight", model.intermediate, model.hidden).T
        down = weight(here + "feed_forward.w2.weight", model.hidden, model.intermediate)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ down.T
    return norm(x) @ weight("lm_head.weight", model.vocab, model.hidden).T
