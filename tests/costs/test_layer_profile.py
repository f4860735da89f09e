"""Layer profiles: exact on the measured points, between the neighbours elsewhere."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servesim.calibrate.imports.cost_tables import import_layers
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Shape
from servesim.costs.device_profile import load_profile
from servesim.costs.imported_tables import LayerCost, equal_chunk
from servesim.costs.parts import interpolate
from servesim.runs.simulate import simulate

ATTENTION = [
    (chunk, cached, rows, context, 1.0 + chunk / 10 + chunk * cached / 1e3 + rows * context / 500 + (rows == 4))
    for chunk in (0, 16, 64)
    for cached in ((0,) if not chunk else (0, 32) if chunk == 16 else (0, 16, 128))  # another grid for each chunk
    for rows in (0, 1, 4, 8)
    for context in ((16, 64, 256) if rows else (0,))
    if chunk or rows
]
DENSE = {"embedding": (3.0, 9.0), "layernorm": (2.0, 5.0), "qkv_proj": (50.0, 80.0), "final_layernorm": (1.0, 2.0)}


def write_table(path: Path, header: str, rows: Sequence[Sequence[object]]) -> None:
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a small layer profile with tokens 1 and 101."""
    path = tmp_path / "profile" / "tp1"
    path.mkdir(parents=True)
    write_table(path / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", ATTENTION)
    dense = [(name, tokens, time) for name, times in DENSE.items() for tokens, time in zip((1, 101), times)]
    write_table(path / "dense.csv", "layer,tokens,time_us", dense)
    write_table(path / "per_sequence.csv", "layer,sequences,time_us", [("lm_head", 1, 700), ("lm_head", 11, 900)])
    (tmp_path / "profile" / "meta.yaml").write_text("gpu: a card\nmodel: a model\n", encoding="utf-8")
    return tmp_path / "profile"


def imported(folder: Path, base: float = 0.0) -> LayerCost:
    return import_layers(folder, folder.parent / f"out{base:g}", 10, base)


def test_several_devices_exchange_results_over_their_link(folder: Path, tmp_path: Path) -> None:
    """The truth of the synthetic engine: the layers, and two all-reduces in each of 10 layers (NVLink, hidden 4096)."""
    alone = imported(folder)
    (folder / "tp1").rename(folder / "tp2")
    (folder / "meta.yaml").write_text("gpu: NVIDIA H100 80GB HBM3\nmodel: meta-llama/Llama-3.1-8B\n", encoding="utf-8")
    cost = import_layers(folder, tmp_path / "two", 10)
    for tokens in (1, 101):
        exchange = 20 * (5e-6 + 2 * 4096 * tokens / (0.7 * 450e9))
        shape = Shape(1, tokens, tokens, tokens**2)
        assert cost.seconds(shape) == pytest.approx(alone.seconds(shape) + exchange, rel=1e-12)
    profile = load_profile(tmp_path / "two")
    assert profile.about["tensor_parallel"] == 2 and "exchanges between 2 devices" in profile.about["how"]


def test_without_a_known_model_or_link_several_devices_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tp1").rename(folder / "tp4")
    (folder / "meta.yaml").unlink()
    command = ["calibrate", "import", "layers", str(folder), "--layers", "10", "-o", str(tmp_path / "out")]
    assert main(command) == 2
    assert "no exchange between 4 devices; set --model and --device" in capsys.readouterr().err
    assert main([*command, "--model", "llama-3.1-8b", "--device", "910B4"]) == 2
    assert "the link of 910B4 is not in the table" in capsys.readouterr().err
    assert main([*command, "--model", "llama-3.1-8b", "--device", "H100"]) == 0


def test_a_step_is_the_sum_of_its_layers(folder: Path) -> None:
    """2 norms and qkv in 10 layers, the embedding and the last norm once; attention of a prompt of 16 tokens."""
    cost = imported(folder, 0.002)
    dense = [low + (high - low) * 15 / 100 for low, high in DENSE.values()]  # at 16 tokens
    once, layer = dense[0] + dense[3], 2 * dense[1] + dense[2] + (1.0 + 1.6)
    assert cost.seconds(Shape(1, 16, 16, 256)) == pytest.approx(0.002 + 1e-6 * (once + 10 * layer + 700), rel=1e-12)
    two = cost.seconds(Shape(decode_rows=8, decode_live=4, context=4 * 64))  # padded to 8 rows
    dense = [low + (high - low) * 7 / 100 for low, high in DENSE.values()]
    once, layer = dense[0] + dense[3], 2 * dense[1] + dense[2] + (1.0 + 4 * 64 / 500 + 1)
    assert two == pytest.approx(0.002 + 1e-6 * (once + 10 * layer + 700 + 200 * 7 / 10), rel=1e-12)
    assert cost.seconds(Shape(swapped=3)) == 0.0


def test_attention_is_exact_on_its_points(folder: Path) -> None:
    cost = imported(folder)
    assert all(cost.attention(*point) == time * 1e-6 for *point, time in ATTENTION)


def nested(rows: Sequence[Sequence[float]]) -> Any:
    """Return rows as dictionaries by their first number, then by the next one; the last number is the value."""
    if len(rows[0]) == 1:
        return rows[0][0]
    groups: dict[float, list[Sequence[float]]] = {}
    for row in rows:
        groups.setdefault(row[0], []).append(row[1:])
    return {key: nested(group) for key, group in groups.items()}


def neighbours(table: Any, point: Sequence[float]) -> list[float]:
    """Return the measured values around a point; none if it is outside. The grid of a dimension can differ by row."""
    if not point:
        return [table]
    below, above = ([x for x in table if (x <= point[0]) == side or x == point[0]] for side in (True, False))
    if not below or not above:
        return []
    parts = [neighbours(table[x], point[1:]) for x in {max(below), min(above)}]
    return [value for part in parts for value in part] if all(parts) else []


def check_between(cost: LayerCost, rows: Sequence[Sequence[float]], count: int) -> None:
    """Assert that attention at random points is between its neighbours: mixed steps, prompts alone, decodes alone."""
    rng = np.random.default_rng(1)
    mixed = [row for row in rows if row[0] and row[2]]
    tables = {
        (1, 1, 1, 1): nested(mixed),
        (1, 1, 0, 0): nested([(row[0], row[1], row[4]) for row in rows if not row[2]]),
        (0, 0, 1, 1): nested([row[2:] for row in rows if not row[0]]),
    }
    low, high = np.array(mixed)[:, :4].min(axis=0), np.array(mixed)[:, :4].max(axis=0)
    for used, table in tables.items():
        checked = 0
        for _ in range(count):
            point = np.exp(rng.uniform(np.log(low + 1), np.log(high + 1))) - 1
            values = neighbours(table, [float(x) for x, flag in zip(point, used) if flag])
            checked += bool(values)
            seconds = cost.attention(*(point * used).tolist())
            assert not values or min(values) <= seconds * 1e6 * (1 + 1e-9), point
            assert not values or seconds * 1e6 * (1 - 1e-9) <= max(values), point
        assert checked > 0.5 * count


def test_attention_between_points_is_between_its_neighbours(folder: Path) -> None:
    cost = imported(folder)
    check_between(cost, ATTENTION, 200)
    assert cost.attention(40, 0, 0, 0) == pytest.approx((2.6 + 7.4) / 2 * 1e-6)
    assert cost.attention(0, 0, 6, 64) == pytest.approx((1 + 4 * 64 / 500 + 1 + 1 + 8 * 64 / 500) / 2 * 1e-6)


def test_more_work_than_measured_takes_more_time(folder: Path) -> None:
    cost = imported(folder)
    assert cost.attention(64, 512, 8, 4096) > cost.attention(64, 128, 8, 256)
    rows = [cost.decode(rows, rows, 1000 * rows) for rows in (8, 16, 64, 256)]
    assert rows == sorted(rows)


def test_the_curve_of_decode_steps_equals_the_table(folder: Path) -> None:
    cost = imported(folder)
    for rows in range(1, 9):
        for context in (0, 5, 16, 40, 64, 200, 256, 300, 1000):
            direct = cost.decodes.look_up((rows, context)) * 10
            shape = Shape(decode_rows=rows, decode_live=rows, context=rows * context)
            fixed = cost.seconds(shape._replace(context=0)) - cost.decodes.look_up((rows, 0)) * 10
            assert cost.duration(shape) == pytest.approx(fixed + direct, rel=1e-9)


def test_several_chunks_are_replaced_by_one_with_the_same_work() -> None:
    assert equal_chunk(Shape(1, 100, 100, 10_000, 5_000)) == (100, 50.0)  # one chunk after 50 cached tokens: itself
    chunk, cached = equal_chunk(Shape(4, 400, 400, 4 * 10_000, 0))
    assert (chunk, cached) == (200.0, 0.0)  # four prompts of 100 tokens: 4 * 100^2 = 200^2
    chunk, cached = equal_chunk(Shape(2, 200, 200, 20_000, 100 * 4000))
    assert chunk * chunk / 2 + chunk * cached == 20_000 / 2 + 400_000


def test_the_profile_is_read_back_and_simulates(folder: Path) -> None:
    cost = imported(folder, 0.002)
    profile = load_profile(folder.parent / "out0.002")
    shape = Shape(1, 20, 20, 400, 0, 3, 3, 100)
    assert profile.cost.seconds(shape) == cost.seconds(shape)
    assert profile.about["device"] == "a card"
    tree = {
        "workload": {
            "requests": 40,
            "arrivals": {"kind": "poisson", "rate": 20},
            "lengths": {"prompt": 60, "output": 20},
        },
        "policy": {"name": "vllm-v1"},
        "profile": str(folder.parent / "out0.002"),
    }
    fast, slow = (simulate(scenario_from(tree), hold=flag) for flag in (True, False))
    assert [r.finish for r in fast.requests] == [r.finish for r in slow.requests]


def test_experts_are_drawn_independently(folder: Path) -> None:
    """With 8 experts and 2 per token, 1 token uses 2 of them, and 2 tokens use 3.5 on average."""
    rows = [(1, 2, 50.0), (1, 8, 90.0), (2, 2, 60.0), (2, 4, 100.0), (2, 8, 120.0)]
    write_table(folder / "tp1" / "moe.csv", "tokens,activated_experts,time_us", rows)
    with pytest.raises(BadInput, match="set --experts and --experts-per-token"):
        imported(folder)
    without = load_layers_of(folder)
    cost = import_layers(folder, folder.parent / "moe", 10, 0.0, (8, 2))
    for tokens, time in ((1, 50.0), (2, 60 + 40 * 0.75)):
        assert dict(cost.tokens)[float(tokens)] - np.interp(tokens, *zip(*without)) == pytest.approx(10 * time * 1e-6)


def load_layers_of(folder: Path) -> list[tuple[float, float]]:
    """Return the curve over tokens without experts."""
    moe = folder / "tp1" / "moe.csv"
    hidden = moe.rename(moe.with_suffix(".hidden"))
    cost = import_layers(folder, folder.parent / "without", 10)
    hidden.rename(moe)
    return list(cost.tokens)


def test_vidur_tables_may_have_a_base(tmp_path: Path) -> None:
    tables = {"comp_ms_per_layer": [1.0] * 9, "kvsave_ms_per_layer": [0.0] * 9}
    tables |= {"attn_decode_ms_per_layer": [[1.0] * 9] * 9, "attn_prefill_ms_per_layer": [[1.0] * 9] * 9}
    np.savez(tmp_path / "vidur.npz", layers=np.array(4), **{key: np.array(value) for key, value in tables.items()})
    command = ["calibrate", "import", "vidur", str(tmp_path / "vidur.npz"), "--base", "0.5", "-o"]
    assert main([*command, str(tmp_path / "out")]) == 0
    shape = Shape(decode_rows=2, decode_live=2, context=10)
    assert load_profile(tmp_path / "out").cost.duration(shape) == pytest.approx(0.008 + 0.5)


REAL = [
    ("bench/vllm-rtx4090/profile", 32),
    ("measured/llmservingsim-rtxpro6000/profile/Llama-3.1-8B", 32),
    ("measured/llmservingsim-rtxpro6000/profile/Qwen3-32B", 64),
]


@pytest.mark.parametrize(("name", "layers"), REAL)
def test_real_profiles_are_exact_on_their_points_and_between_neighbours_elsewhere(
    shared: Path, tmp_path: Path, name: str, layers: int
) -> None:
    source = shared / "data" / name
    cost = import_layers(source, tmp_path / "out", layers)
    path = next(source.glob("tp*/attention.csv*"))
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        rows = [[float(cell) for cell in row] for row in list(csv.reader(file))[1:]]
    assert len(rows) > 8000
    assert [cost.attention(*row[:4]) for row in rows] == [row[4] * 1e-6 for row in rows]
    check_between(cost, rows, 1000)
    assert (np.diff([seconds for _, seconds in cost.tokens]) < 0).any()  # measured, so not monotone
    for curve in (cost.tokens, cost.sequences):
        for (x0, y0), (x1, y1) in zip(curve, curve[1:]):
            assert interpolate(curve, x0) == y0
            assert min(y0, y1) <= interpolate(curve, (x0 + x1) / 2) <= max(y0, y1)


def test_a_real_profile_predicts_its_run(shared: Path, tmp_path: Path) -> None:
    """Llama-3.1-8B on an RTX PRO 6000, from the layer profile alone: E2E within 6 %, TPOT within 5 %."""
    folder = shared / "data" / "measured" / "llmservingsim-rtxpro6000"
    import_layers(folder / "profile" / "Llama-3.1-8B", tmp_path / "out", 32)
    with gzip.open(folder / "Llama-3.1-8B" / "requests.csv.gz", "rt") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: float(row["arrival_s"]))
    keys = ("arrival_s", "prompt_tokens", "output_tokens")
    write_table(tmp_path / "trace.csv", ",".join(keys), [[row[key] for key in keys] for row in rows])
    tree = {
        "trace": str(tmp_path / "trace.csv"),
        "policy": {"name": "vllm-v1", "max_num_seqs": 128, "max_num_batched_tokens": 2048},
        "engine": {"num_blocks": 33000},
        "profile": str(tmp_path / "out"),
    }
    run = simulate(scenario_from(tree))
    measured = np.mean([float(row["last_token_s"]) - float(row["arrival_s"]) for row in rows])
    assert float(np.mean(run.measures.e2el)) == pytest.approx(measured, rel=0.06)
    assert run.result()["mean_tpot_ms"] == pytest.approx(32.458, rel=0.05)
