"""The best configurations of a sweep, read from its folder as scenarios to replay."""

from __future__ import annotations

import csv
from pathlib import Path

from servesim.config.overrides import override, read_tree
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput
from servesim.study.experiment import read_experiment


def winners(path: Path, top: int, baseline: bool = False, settings: tuple[str, ...] = ()) -> list[tuple[str, Scenario]]:
    """Return the first `top` of a sweep with their names, and the baseline with them if asked for."""
    if path.is_file():  # a best.yaml by itself
        return [(path.stem, scenario_from(override(read_tree(path), settings), str(path)))]
    ranking = path / "summary.csv"
    if not ranking.is_file():
        raise BadInput(f"{path}: expected the folder of a finished `sim sweep`; it has no summary.csv")
    experiment = read_experiment(path)
    with ranking.open(encoding="utf-8", newline="") as lines:
        order = [int(row["config"]) for row in csv.DictReader(lines)]
    chosen = order[:top]
    if baseline and 0 not in chosen:
        chosen.append(0)
    return [
        (name_of(config, order), scenario_from(override(experiment.tree(config), settings), f"{path}: {config}"))
        for config in chosen
    ]


def name_of(config: int, order: list[int]) -> str:
    """Return a folder name for a configuration."""
    return f"rank{order.index(config) + 1}" + ("-baseline" if config == 0 else "")
