"""The torch backend: paged steps against a plain full pass, on the CPU (and on a GPU where there is one)."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install servesim[torch]")

from servesim.calibrate.device import self_test  # noqa: E402
from servesim.calibrate.device.backend import MODELS, Backend, Model, OutOfMemory, Row  # noqa: E402
from servesim.calibrate.device.self_test import PagedRun, ScriptedRequest  # noqa: E402
from servesim.calibrate.device.torch.backend import TorchBackend  # noqa: E402
from servesim.calibrate.device.torch.packing import Packer  # noqa: E402
from servesim.core import BadInput  # noqa: E402

MICRO = MODELS["micro"]
GROUPED = Model("grouped", 2, 64, 8, 2, 96, 256, 512)  # four query heads share a key head
TOLERANCE = 1e-5  # float32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products on a busy machine: threads that wait for each other cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_takes_the_tests_of_the_cpu_too() -> None:
    """On a machine without one, this is the one skip that says that they ran on the CPU only."""
    assert TorchBackend("cuda").describe()["device"] == torch.cuda.get_device_name()


def loaded(
    device: str = "cpu", model: Model = MICRO, blocks: int = 96, host_blocks: int = 24, **options: Any
) -> TorchBackend:
    backend = TorchBackend(device, **options)
    backend.load(model, blocks, 16, host_blocks)
    return backend


def paged_run(backend: TorchBackend, seed: int = 1) -> PagedRun:
    return PagedRun(backend, seed, poison=True)


def faithful(run: PagedRun) -> bool:
    seen = run.compare()
    return len(seen.errors) == run.rows and seen.missed == 0 and seen.distance < TOLERANCE


@pytest.mark.parametrize("model", [MICRO, GROUPED, MODELS["tiny"]], ids=lambda model: model.name)
def test_paged_decode_gives_the_tokens_of_a_plain_full_pass(device: str, model: Model) -> None:
    paged = paged_run(loaded(device, model))
    one = paged.begin(37)
    paged.step({one: 37})
    for _ in range(30):
        paged.decode(one)
    assert len(one.tokens) == 37 + 31
    assert faithful(paged)


def test_batches_that_grow_shrink_swap_out_and_come_back_stay_exact(device: str) -> None:
    paged = paged_run(loaded(device))
    a, b, c = paged.begin(5), paged.begin(33), paged.begin(16)
    paged.step({a: 5})
    paged.decode(a)
    paged.step({b: 33, c: 16})
    paged.decode(a, b, c)
    paged.swap_out(b)
    paged.decode(c, a)
    d = paged.begin(90)
    paged.step({d: 90})
    paged.decode(a, c, d)
    paged.swap_in(b)
    paged.decode(d, b, a, c)
    paged.finish(a)
    paged.swap_out(d)
    paged.swap_out(c)
    paged.decode(b)
    paged.swap_in(d)
    paged.decode(b, d)
    paged.swap_in(c)
    for _ in range(20):
        paged.decode(c, b, d)
    assert paged.rows == 80
    assert faithful(paged)


def test_a_prompt_in_chunks_gives_what_the_whole_prompt_gives(device: str) -> None:
    paged = paged_run(loaded(device))
    prompt = paged.begin(100)
    for tokens in (16, 1, 30, 17, 36):
        paged.step({prompt: tokens})
    paged.decode(prompt)
    whole = paged_run(loaded(device))
    same = whole.begin(100)
    whole.step({same: 100})
    whole.decode(same)
    assert prompt.tokens == same.tokens
    assert faithful(paged)


def test_prompts_chunks_and_decodes_in_one_step_answer_in_the_order_of_the_rows(device: str) -> None:
    paged = paged_run(loaded(device))
    requests = [paged.begin(length) for length in (40, 3, 1, 70)]
    paged.step({requests[0]: 40, requests[3]: 20})
    late = paged.begin(21)
    found = paged.step({late: 21, requests[0]: 1, requests[1]: 3, requests[3]: 50, requests[2]: 1})
    assert [request.tokens[-1] for request in (late, *requests[:2], requests[3], requests[2])] == found
    assert faithful(paged)


def test_a_long_random_life_stays_exact(device: str) -> None:
    paged = paged_run(loaded(device, host_blocks=48), seed=7)
    rng = random.Random(11)
    here: list[ScriptedRequest] = []
    away: list[ScriptedRequest] = []
    for _ in range(60):
        act = rng.choice(["begin", "begin", "swap out", "swap in", "finish"])
        if act == "begin" and len(here) < 9:
            request = paged.begin(rng.randrange(1, 60))
            paged.step({request: len(request.tokens)} | dict.fromkeys(rng.sample(here, len(here) // 2), 1))
            here.append(request)
        elif act == "swap out" and here and len(away) < 4:
            away.append(here.pop(rng.randrange(len(here))))
            paged.swap_out(away[-1])
        elif act == "swap in" and away:
            here.append(away.pop(rng.randrange(len(away))))
            paged.swap_in(here[-1])
        elif act == "finish" and len(here) > 5:
            paged.finish(here.pop(rng.randrange(len(here))))
        if here:
            paged.decode(*here)
    assert paged.rows > 200
    assert faithful(paged)


@pytest.mark.parametrize("seed", range(3))
def test_the_workout_that_every_backend_takes_finds_no_error(device: str, seed: int) -> None:
    seen = self_test.run(loaded(device), {"seed": seed})
    assert seen["swaps"] > 0
    assert seen["chunks"] > 0
    assert seen["differ"] == 0
    assert seen["error"] < TOLERANCE
    assert self_test.run(loaded(device), {"seed": seed, "spoil": True})["error"] > 1e-3


def test_a_mutated_table_changes_the_result(device: str) -> None:
    backend = loaded(device)
    paged = paged_run(backend)
    one, other = paged.begin(40), paged.begin(40)
    paged.step({one: 40, other: 40})
    right = Row(one.tokens[-1:], 40, array("i", one.table))
    backend.step([right])
    expected = backend.logits()
    for block in range(len(one.table)):
        wrong = list(one.table)
        wrong[block] = other.table[block]
        backend.step([Row(right.tokens, 40, wrong)])
        assert abs(backend.logits() - expected).max() > 0.01
    backend.step([right])
    assert abs(backend.logits() - expected).max() < TOLERANCE


def test_tables_may_be_lists_tuples_or_arrays() -> None:
    backend = loaded()
    tokens = list(range(20))
    found = [backend.step([Row(tokens, 0, kind([4, 90, 7]))]) for kind in (list, tuple, lambda t: array("i", t))]
    found.append(backend.step([Row(array("i", tokens), 0, array("q", [4, 90, 7]))]))
    assert found == [found[0]] * 4


def test_the_padding_of_a_gear_touches_no_block_of_the_pool(device: str) -> None:
    backend = loaded(device)
    backend.loaded.cache.fill_(3.0)
    backend.step([Row([1], 0, [5]), Row([2], 0, [6]), Row([3], 0, [7])])
    backend.step([Row([1] * 17, 0, [8, 9])])
    changed = (backend.loaded.cache[:96] != 3.0).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [5, 6, 7, 8, 9]


def test_steps_beyond_the_gears_run_unpadded(device: str) -> None:
    backend = loaded(device, gears=(1, 2), token_gears=(16,))
    paged = paged_run(backend)
    requests = [paged.begin(9) for _ in range(5)]
    paged.step(dict.fromkeys(requests, 9))
    paged.decode(*requests)
    assert backend.packer.form(45, 5, 0)[:2] == (45, 5)
    assert backend.packer.form(5, 5, 5)[:2] == (5, 5)
    assert faithful(paged)


def test_a_step_takes_the_smallest_gear_that_holds_it() -> None:
    packer = loaded(blocks=200).packer
    assert packer.gears[-1] == 192
    assert packer.form(tokens=3, rows=3, singles=3) == (4, 4, False, True)
    assert packer.form(tokens=33, rows=2, singles=0) == (64, 64, True, False)
    assert packer.form(tokens=500, rows=130, singles=129) == (512, 192, True, True)
    assert packer.form(tokens=513, rows=1, singles=0) == (513, 1, True, False)
    assert packer.form(tokens=193, rows=193, singles=193) == (193, 193, False, True)
    assert len(packer.forms()) == len(set(packer.forms())) == 13 + 2 * 10


def test_long_rows_are_cut_into_tiles_those_with_most_keys_first() -> None:
    buffer = np.zeros(2000, np.int32)
    packer = Packer(buffer, 100, 16, 512, 256, tile=8, gears=[4], token_gears=[])
    rows = [Row([1] * 10, 20, [5, 6]), Row([7], 3, [9]), Row([2] * 8, 0, [8])]
    form, used, order = packer.pack(rows)
    assert order == [1, 0, 2]
    assert form == (19, 3, True, True)
    assert buffer[:2].tolist() == [3, 1]
    tables = buffer[form.tables : form.tables + 3].tolist()
    assert buffer[form.end : form.end + 21].reshape(3, 7).tolist() == [
        [tables[1], 9, 2, 28, 0, 30, 0],  # the last two of ten tokens behind twenty: thirty keys
        [tables[1], 1, 8, 20, 0, 28, 0],
        [tables[2], 11, 8, 0, 0, 8, 0],
    ]
    assert buffer[tables[0] : used].tolist() == [9, 5, 6, 8]
    assert buffer[form.slots : form.slots + 3].tolist() == [9 * 16 + 3, 6 * 16 + 4, 6 * 16 + 5]
    assert buffer[form.last : form.last + 3].tolist() == [0, 10, 18]


def test_a_step_larger_than_the_buffer_is_out_of_memory() -> None:
    packer = Packer(np.zeros(100, np.int32), 100, 16, 512, 256, tile=8, gears=[4], token_gears=[])
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


def test_a_cache_that_does_not_fit_is_refused_and_a_smaller_one_can_follow() -> None:
    backend = loaded()
    expected = backend.step([Row([1, 2, 3], 0, [3])])
    with pytest.raises(OutOfMemory, match="allocate"):
        backend.load(MICRO, 10**14, 16)  # more than any address space, so that no kernel overcommits it
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
def test_a_row_that_would_leave_the_arrays_is_refused(row: Row, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loaded().step([row])


def test_a_step_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        loaded().step([])


def test_fused_kernels_need_a_cuda_device() -> None:
    with pytest.raises(BadInput, match="kernels: fused on cpu, expected reference, or fused on CUDA"):
        TorchBackend("cpu", kernels="fused")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="device: cuda, but torch has only the cpu here"):
        TorchBackend("cuda")


def test_a_swap_outside_the_pools_is_refused() -> None:
    backend = loaded(host_blocks=2)
    with pytest.raises(ValueError, match="block 0 of 96 to block 2 of 2"):
        backend.swap_out([(0, 2)])
    with pytest.raises(ValueError, match="block -1 of 2 to block 0 of 96"):
        backend.swap_in([(-1, 0)])


def test_describe_says_what_a_profile_is_stamped_with() -> None:
    backend: Backend = loaded(blocks=40)
    about = backend.describe()
    assert about["kernels"] == "reference"
    assert about["dtype"] == "float32"
    assert about["model"]["name"] == "micro"
    assert (about["blocks"], about["block_size"], about["host_blocks"]) == (40, 16, 24)
    assert about["gears"] == [1, 2, 4, 8, 16, 24, 32]
    assert about["versions"]["torch"] == torch.__version__
    assert set(TorchBackend("cpu").describe()) == {"backend", "device", "kernels", "threads", "versions"}


def stored(path: Path, tensors: dict[str, Any]) -> None:
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
    stored(tmp_path / "model-00001-of-00002.safetensors", first)
    stored(tmp_path / "model-00002-of-00002.safetensors", {n: t for n, t in tensors.items() if n not in first})
    backend = TorchBackend("cpu")
    backend.load(GROUPED, 32, 16, weights=str(tmp_path))
    layer = backend.loaded.weights.layers[1]
    assert torch.equal(layer.qkv[64:80], tensors["model.layers.1.self_attn.k_proj.weight"])
    assert torch.equal(layer.gate_up[96:], tensors["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(backend.loaded.weights.head, tensors["model.embed_tokens.weight"])  # tied
    tokens = list(range(0, 200, 7))
    backend.step([Row(tokens, 0, [9, 4])])
    expected = backend.plain(tokens)[-1]
    assert abs(backend.logits()[0] - expected).max() < 1e-4  # logits of a few tens


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    stored(file, hugging_face_layout(MICRO))
    with pytest.raises(BadInput, match=r"k_proj.weight: shape \[64, 64\], model grouped expects \[16, 64\]"):
        TorchBackend("cpu").load(GROUPED, 8, 16, weights=str(file))
    file.write_bytes(b"not it")
    with pytest.raises(BadInput, match="not a safetensors file"):
        TorchBackend("cpu").load(MICRO, 8, 16, weights=str(file))
    with pytest.raises(BadInput, match="expected a safetensors file or a folder"):
        TorchBackend("cpu").load(MICRO, 8, 16, weights=str(tmp_path / "nowhere"))


def test_how_many_threads_it_may_use_is_described_and_checked() -> None:
    before = torch.get_num_threads()
    try:
        assert TorchBackend(device="cpu", threads=1).describe()["threads"] == 1
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(BadInput, match="threads: expected at least 1, got 0"):
        TorchBackend(device="cpu", threads=0)
