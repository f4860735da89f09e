"""The torch backend: paged steps compared with a full pass without a cache, on the CPU and on a GPU if available."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")

from servesim.calibrate.device.backend import MODELS, Model, OutOfMemory, Row  # noqa: E402
from servesim.calibrate.device.torch.backend import TorchBackend  # noqa: E402
from servesim.calibrate.device.torch.packing import Packer  # noqa: E402

from . import paged_runs  # noqa: E402
from .paged_runs import PagedRun, reference_logits  # noqa: E402

MICRO = MODELS["micro"]
GROUPED = Model("grouped", 2, 64, 8, 2, 96, 256, 512)  # four query heads share a key head
TOLERANCE = 1e-5  # float32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: with these small products, more threads are slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def loaded(
    device: str = "cpu", model: Model = MICRO, blocks: int = 96, host_blocks: int = 24, **options: Any
) -> TorchBackend:
    backend = TorchBackend(device, **options)
    backend.load(model, blocks, 16, host_blocks)
    return backend


def paged_run(backend: TorchBackend, seed: int = 1) -> PagedRun:
    return PagedRun(backend, seed, poison=True)


def matches_reference(run: PagedRun) -> bool:
    result = run.compare()
    return len(result.errors) == run.rows and result.wrong_tokens == 0 and result.max_difference < TOLERANCE


@pytest.mark.parametrize("model", [MICRO, GROUPED, MODELS["tiny"]], ids=lambda model: model.name)
def test_paged_decode_matches_a_pass_without_a_cache(device: str, model: Model) -> None:
    paged = paged_run(loaded(device, model))
    request = paged.add_request(37)
    paged.step({request: 37})
    for _ in range(30):
        paged.decode(request)
    assert len(request.tokens) == 37 + 31
    assert matches_reference(paged)


def test_tokens_of_a_mixed_step_have_the_order_of_the_rows(device: str) -> None:
    paged = paged_run(loaded(device))
    requests = [paged.add_request(length) for length in (40, 3, 1, 70)]
    paged.step({requests[0]: 40, requests[3]: 20})
    late = paged.add_request(21)
    tokens = paged.step({late: 21, requests[0]: 1, requests[1]: 3, requests[3]: 50, requests[2]: 1})
    assert [request.tokens[-1] for request in (late, *requests[:2], requests[3], requests[2])] == tokens
    assert matches_reference(paged)


@pytest.mark.parametrize("seed", range(3))
def test_the_self_test_finds_no_error(device: str, seed: int) -> None:
    result = paged_runs.run(loaded(device), {"seed": seed})
    assert result["swaps"] > 0
    assert result["chunks"] > 0
    assert result["differ"] == 0
    assert result["error"] < TOLERANCE
    assert paged_runs.run(loaded(device), {"seed": seed, "spoil": True})["error"] > 1e-3


def test_tables_may_be_lists_tuples_or_arrays() -> None:
    backend = loaded()
    tokens = list(range(20))
    results = [backend.step([Row(tokens, 0, kind([4, 90, 7]))]) for kind in (list, tuple, lambda t: array("i", t))]
    results.append(backend.step([Row(array("i", tokens), 0, array("q", [4, 90, 7]))]))
    assert results == [results[0]] * 4


def test_padding_writes_to_no_block_of_the_pool(device: str) -> None:
    backend = loaded(device)
    backend.loaded.cache.fill_(3.0)
    backend.step([Row([1], 0, [5]), Row([2], 0, [6]), Row([3], 0, [7])])
    backend.step([Row([1] * 17, 0, [8, 9])])
    changed = (backend.loaded.cache[:96] != 3.0).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [5, 6, 7, 8, 9]


def test_steps_above_the_largest_bucket_run_unpadded(device: str) -> None:
    backend = loaded(device, row_buckets=(1, 2), token_buckets=(16,))
    paged = paged_run(backend)
    requests = [paged.add_request(9) for _ in range(5)]
    paged.step(dict.fromkeys(requests, 9))
    paged.decode(*requests)
    assert backend.packer.graph_shape(45, 5, 0)[:2] == (45, 5)
    assert backend.packer.graph_shape(5, 5, 5)[:2] == (5, 5)
    assert matches_reference(paged)


def test_a_step_uses_the_smallest_padding_bucket_that_fits() -> None:
    packer = loaded(blocks=200).packer
    assert packer.row_buckets[-1] == 192
    assert packer.graph_shape(tokens=3, rows=3, singles=3) == (4, 4, False, True)
    assert packer.graph_shape(tokens=33, rows=2, singles=0) == (64, 64, True, False)
    assert packer.graph_shape(tokens=500, rows=130, singles=129) == (512, 192, True, True)
    assert packer.graph_shape(tokens=513, rows=1, singles=0) == (513, 1, True, False)
    assert packer.graph_shape(tokens=193, rows=193, singles=193) == (193, 193, False, True)
    assert len(packer.graph_shapes()) == len(set(packer.graph_shapes())) == 13 + 2 * 10


def test_tiles_of_long_rows_are_sorted_by_keys() -> None:
    buffer = np.zeros(2000, np.int32)
    packer = Packer(buffer, 100, 16, 512, 256, tile=8, row_buckets=[4], token_buckets=[])
    rows = [Row([1] * 10, 20, [5, 6]), Row([7], 3, [9]), Row([2] * 8, 0, [8])]
    shape, used, order, *_ = packer.pack(rows)
    assert order == [1, 0, 2]
    assert shape == (19, 3, True, True)
    assert buffer[:2].tolist() == [3, 1]
    tables = buffer[shape.tables : shape.tables + 3].tolist()
    assert buffer[shape.end : shape.end + 21].reshape(3, 7).tolist() == [
        [tables[1], 9, 2, 28, 0, 30, 0],  # the last 2 of 10 tokens after 20 cached ones: 30 keys
        [tables[1], 1, 8, 20, 0, 28, 0],
        [tables[2], 11, 8, 0, 0, 8, 0],
    ]
    assert buffer[tables[0] : used].tolist() == [9, 5, 6, 8]
    assert buffer[shape.slots : shape.slots + 3].tolist() == [9 * 16 + 3, 6 * 16 + 4, 6 * 16 + 5]
    assert buffer[shape.last : shape.last + 3].tolist() == [0, 10, 18]


def test_a_step_larger_than_the_buffer_is_out_of_memory() -> None:
    packer = Packer(np.zeros(100, np.int32), 100, 16, 512, 256, tile=8, row_buckets=[4], token_buckets=[])
    with pytest.raises(OutOfMemory, match="40 tokens and 3 table entries"):
        packer.pack([Row([1] * 40, 0, [1, 2, 3])])


def test_the_same_seed_gives_the_same_model_and_another_seed_another() -> None:
    rows = [Row(list(range(30)), 0, [0, 1])]
    same = [loaded(seed=seed) for seed in (0, 0, 1)]
    logits = []
    for backend in same:
        backend.step(rows)
        logits.append(backend.logits())
    assert (logits[0] == logits[1]).all()
    assert abs(logits[0] - logits[2]).max() > 0.1


def test_running_out_of_memory_leaves_the_backend_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = loaded()
    row = Row(list(range(10)), 0, [3])
    expected = backend.step([row])

    def fail(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(backend.loaded, "forward", fail)
        with pytest.raises(OutOfMemory, match=r"^CUDA out of memory. Tried to allocate 9 GiB$"):
            backend.step([row])
    assert backend.step([row]) == expected


def test_after_out_of_memory_a_smaller_cache_can_be_loaded() -> None:
    backend = loaded()
    expected = backend.step([Row([1, 2, 3], 0, [3])])
    with pytest.raises(OutOfMemory, match="allocate"):
        backend.load(MICRO, 10**14, 16)  # more than any address space, so the operating system cannot overcommit it
    with pytest.raises(RuntimeError, match="no model is loaded"):
        backend.step([Row([1], 0, [0])])
    backend.load(MICRO, 8, 16)
    assert backend.step([Row([1, 2, 3], 0, [3])]) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row([], 0, [0]), "at least one token"),
        (Row([1] * 17, 0, [0]), "1 blocks of 16 cannot hold 17 tokens"),
        (Row([1], 512, list(range(33))), "positions 512..512 outside 0..511"),
        (Row([1], -1, [0]), "positions -1"),
        (Row([256], 0, [0]), "token ids 256..256 outside 0..255"),
        (Row([1], 0, [96]), "blocks 96..96 outside 0..95"),
        (Row([1], 0, [-1]), "blocks -1..-1 outside 0..95"),
        (Row([1 << 40], 0, [0]), "32-bit integers"),
    ],
)
def test_error_for_a_row_outside_the_device_arrays(row: Row, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loaded().step([row])


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    """Write a safetensors file."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        kind = {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def hugging_face_layout(model: Model) -> dict[str, Any]:
    torch.manual_seed(3)
    hidden, kv, wide = model.hidden, model.kv_heads * model.hidden // model.heads, model.intermediate
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    shapes |= {
        "self_attn.o_proj": (hidden, hidden),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(model.layers) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (model.vocab, hidden), "model.norm.weight": (hidden,)}
    return {name: 0.1 * torch.randn(shape) for name, shape in names.items()}


def test_real_weights_come_from_safetensors_in_the_hugging_face_layout(tmp_path: Path) -> None:
    tensors = hugging_face_layout(GROUPED)
    first = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    second = {name: tensor for name, tensor in tensors.items() if name not in first}
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", first)
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", second)
    backend = TorchBackend("cpu")
    backend.load(GROUPED, 32, 16, weights=str(tmp_path))
    layer = backend.loaded.weights.layers[1]
    assert torch.equal(layer.qkv[64:80], tensors["model.layers.1.self_attn.k_proj.weight"])
    assert torch.equal(layer.gate_up[96:], tensors["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(backend.loaded.weights.head, tensors["model.embed_tokens.weight"])  # tied
    tokens = list(range(0, 200, 7))
    backend.step([Row(tokens, 0, [9, 4])])
    expected = reference_logits(backend, tokens)[-1]
    assert abs(backend.logits()[0] - expected).max() < 1e-4  # logits of a few tens
