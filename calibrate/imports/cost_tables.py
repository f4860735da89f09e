"""Import tables of step costs as a profile: times of single layers, and Vidur's tables.

LLMServingSim's profiler writes a layer profile as CSV files, in microseconds of each layer: `dense` has the layers by
tokens, `per_sequence` those by sequences, `attention` the attention of one layer by prefill chunk, cached tokens before
it, decoding rows and their context; `moe` the experts by tokens and activated experts. In the folder tpN they are those
of one of N devices, without the exchange between them, which follows from the link.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import BadInput
from servesim.core.limits import MAX_NUMBER
from servesim.costs.derivation import all_reduce
from servesim.costs.device_profile import write_profile
from servesim.costs.imported_tables import (
    CONTEXT_STEP,
    DIMENSIONS,
    MAX_MICROSECONDS,
    LayerCost,
    VidurCost,
    layer_cost,
    load_vidur,
)
from servesim.costs.public_devices import device_of
from servesim.costs.public_models import find_device, find_model
from servesim.costs.uncertainty import MODEL_SPREAD, TTFT_SPREAD
from servesim.files.csv_rows import read_csv
from servesim.files.write import check_new, replacing
from servesim.files.yaml_reader import read_yaml

Array = NDArray[np.float64]
ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
ONCE = ("embedding", "final_layernorm")  # once per step; every other layer is part of each transformer layer
TWICE = ("layernorm",)  # before attention and before the MLP


def import_layers(
    source: Path,
    out: Path,
    layers: int,
    base: float = 0.0,
    experts: Optional[tuple[int, int]] = None,
    names: Optional[Mapping[str, str]] = None,
) -> LayerCost:
    """Convert a folder of layer times into a profile folder; return its cost model.

    `experts`: the number of experts of a layer, and how many of them a token uses. `names`: `model` and `device`, if
    meta.yaml does not have them.
    """
    check_new(out / "profile.yaml", "profile")
    folder = find_folder(source)
    about = layers_meta(folder, names or {})
    tables = {
        "tokens": token_table(folder, layers, experts, about),
        "sequences": sum_curves(read_curves(find_table(folder, "per_sequence"), "sequences")),
        "attention": np.array(sorted(read_rows(find_table(folder, "attention"), ATTENTION))),
        "layers": np.array(layers),
    }
    cost = layer_cost(tables, base, str(folder))  # also checks the tables, before anything is written
    with replacing(out / "tables.npz") as part, open(part, "wb") as file:
        tokens, sequences, attention, count = (tables[name] for name in ("tokens", "sequences", "attention", "layers"))
        np.savez_compressed(file, tokens=tokens, sequences=sequences, attention=attention, layers=count)
    write_profile(out, layers_about(folder, out, tables, base, about), cost_keys("layers", base))
    return cost


def import_vidur(path: Path, out: Path, base: float = 0.0) -> VidurCost:
    """Convert a file of Vidur's tables into a profile folder; return its cost model. `base`: host seconds per step."""
    cost = load_vidur(path, base)
    check_new(out / "profile.yaml", "profile")
    with replacing(out / "tables.npz") as part:
        shutil.copyfile(path, part)
    about = {
        "name": out.name,
        "how": f"imported from {path.name}: Vidur's step-cost tables; shapes are rounded up to the next table entry",
        "grid": {
            "prefill_tokens": [1, len(cost.comp) - 1],
            "decode_rows": [1, len(cost.attend) - 1],
            "context": [0, (len(cost.attend) - 1) * (len(cost.attend[0]) - 1) * CONTEXT_STEP],
        },
        "uncertainty": {"session": MODEL_SPREAD, "ttft": TTFT_SPREAD},
    }
    write_profile(out, about, cost_keys("vidur", base))
    return cost


def cost_keys(kind: str, base: float) -> dict[str, Any]:
    """Return the cost section of a profile with tables."""
    return {"kind": kind, "tables": "tables.npz", **({"base": base} if base else {})}


def layers_meta(folder: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the device, the model and the number of devices of layer times, as keys of a profile."""
    meta = next((path for path in (folder / "meta.yaml", folder.parent / "meta.yaml") if path.is_file()), None)
    found = read_yaml(meta) if meta is not None else {}
    known = {"device": names.get("device") or found.get("gpu"), "model": names.get("model") or found.get("model")}
    number = re.fullmatch(r"tp(\d{1,4})", folder.resolve().name)
    degree = int(number[1]) if number is not None else 1
    return {**{key: str(value) for key, value in known.items() if value}, "tensor_parallel": max(1, degree)}


def exchange_curve(folder: Path, layers: int, tokens: Array, about: Mapping[str, Any]) -> Array:
    """Return the microseconds of a step's exchanges between the devices, over tokens: two all-reduces per layer."""
    where = f"{folder}: layer times have no exchange between {about['tensor_parallel']} devices"
    if not {"model", "device"} <= set(about):
        raise BadInput(f"{where}; set --model and --device to compute it from the link")
    device = device_of(about) or find_device(about["device"], f"{where}: device")
    if not device.link:
        raise BadInput(f"{where}, and the link of {device.shown} is not in the table")
    size = 2 * find_model(about["model"], f"{where}: model").hidden  # bytes of a token
    return np.array([2e6 * layers * all_reduce(size * n, about["tensor_parallel"], device.link) for n in tokens])


def token_table(folder: Path, layers: int, experts: Optional[tuple[int, int]], about: Mapping[str, Any]) -> Array:
    """Return the microseconds per step of all layers without attention, over tokens."""
    curves = []
    dense = read_curves(find_table(folder, "dense"), "tokens")
    for name, (tokens, times) in dense.items():
        curves.append((tokens, times * (1 if name in ONCE else 2 * layers if name in TWICE else layers)))
    moe = find_table(folder, "moe", required=False)
    if moe is not None:
        if experts is None:
            raise BadInput(f"{moe}: the model has experts; set --experts and --experts-per-token")
        tokens, times = expert_curve(read_rows(moe, ("tokens", "activated_experts", "time_us")), *experts)
        curves.append((tokens, times * layers))
    if about["tensor_parallel"] > 1:
        points = np.unique(np.concatenate([tokens for tokens, _ in curves]))
        curves.append((points, exchange_curve(folder, layers, points, about)))
    return sum_curves(dict(enumerate(curves)))


def expert_curve(rows: Sequence[tuple[float, ...]], experts: int, per_token: int) -> tuple[Array, Array]:
    """Return the microseconds of the experts over tokens, if every token draws its experts independently."""
    table = np.array(sorted(rows))
    tokens = np.unique(table[:, 0])
    activated = experts * (1 - (1 - per_token / experts) ** tokens)
    times = [np.interp(count, *table[table[:, 0] == number][:, 1:].T) for number, count in zip(tokens, activated)]
    return tokens, np.array(times)


def sum_curves(curves: Mapping[Any, tuple[Array, Array]]) -> Array:
    """Return the sum of curves at all of their points, as rows of (point, value)."""
    points = np.unique(np.concatenate([points for points, _ in curves.values()]))
    return np.stack([points, sum(np.interp(points, *curve) for curve in curves.values())], axis=1)


def read_curves(path: Path, column: str) -> dict[str, tuple[Array, Array]]:
    """Return the microseconds of each layer over a column."""
    curves: dict[str, dict[float, float]] = {}
    names = [row["layer"] for row in read_csv(path, ("layer", column, "time_us"))]
    for name, (point, time) in zip(names, read_rows(path, (column, "time_us"))):
        curves.setdefault(name, {})[point] = time
    return {
        name: (np.array(sorted(curve)), np.array([curve[x] for x in sorted(curve)])) for name, curve in curves.items()
    }


def read_rows(path: Path, columns: Sequence[str]) -> list[tuple[float, ...]]:
    """Return columns of a CSV file as numbers of at least 0; the last column is a time in microseconds."""
    limits = dict.fromkeys(columns, MAX_NUMBER) | {columns[-1]: MAX_MICROSECONDS}
    rows = [tuple(row.number(column, 0, limit) for column, limit in limits.items()) for row in read_csv(path, columns)]
    if not rows:
        raise BadInput(f"{path}: expected at least one row, got none")
    return rows


def find_folder(source: Path) -> Path:
    """Return the folder of the CSV files: the given one, or its only folder tp1, tp2..."""
    if not source.is_dir():
        raise BadInput(f"{source}: no such folder; expected a layer profile with attention.csv and dense.csv")
    if find_table(source, "dense", required=False) is not None:
        return source
    folders = sorted(path for path in source.glob("tp*") if path.is_dir())
    if len(folders) != 1:
        names = ", ".join(path.name for path in folders) or "no folder"
        raise BadInput(f"{source}: expected dense.csv, or one folder tp1, tp2...; got {names}: give the folder itself")
    return folders[0]


def find_table(folder: Path, name: str, required: bool = True) -> Any:
    """Return the path of a table, plain or gzipped; None if it is absent and not required."""
    paths = [folder / f"{name}.csv", folder / f"{name}.csv.gz"]
    found = next((path for path in paths if path.is_file()), None)
    if found is None and required:
        raise BadInput(f"{folder}: expected {name}.csv or {name}.csv.gz, got neither")
    return found


def layers_about(
    folder: Path, out: Path, tables: Mapping[str, Array], base: float, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the source and the measured range of a layer profile."""
    attention = tables["attention"]
    decodes = attention[attention[:, 0] == 0]
    degree = about["tensor_parallel"]
    exchange = f", exchanges between {degree} devices computed from their link" if degree > 1 else ""
    return {
        "name": out.name,
        **about,
        "tensor_parallel": degree if degree > 1 else None,
        "how": f"imported from {folder.name}: times of single layers, {int(tables['layers'])} layers{exchange}; host "
        "time " + (f"of {base:g} s per step added" if base else "is not part of it"),
        "grid": {
            "prefill_tokens": [float(tables["tokens"][0, 0]), float(tables["tokens"][-1, 0])],
            "decode_rows": [1, float(decodes[:, 2].max())],
            "context": [0, float((decodes[:, 2] * decodes[:, DIMENSIONS - 1]).max())],
        },
        "uncertainty": {"session": MODEL_SPREAD, "ttft": TTFT_SPREAD},
    }
