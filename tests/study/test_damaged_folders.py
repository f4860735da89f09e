"""Damaged folders: every command that reads one ends with one line and an exit code, never with a traceback."""

from __future__ import annotations

import csv
import gzip
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from servesim.core import BadInput
from servesim.costs.device_profile import bundled_profiles

from ..conftest import seeds
from . import sweeps
from .damage import copy_folder, damage
from .test_search import search_file

MUTATIONS = 4  # of each part of a case
QUIET = ("-j", 1, "-q", "--no-report")


def reads(function: Callable[[Path], Any]) -> Callable[[Path], int]:
    """Return a reader without a command of its own as a command."""

    def run(folder: Path) -> int:
        try:
            function(folder)
        except BadInput as bad:
            print(f"sim: {bad}", file=sys.stderr)
            return 2
        return 0

    return run


def top(folder: Path) -> Any:
    from servesim.calibrate.replay.replay import top_scenarios

    return top_scenarios(folder / "sweep", 3, baseline=True)


def probe_again(folder: Path) -> Any:
    from servesim.calibrate.probe.session import ProbeSession, read_probe

    probed = read_probe(folder / "profile")
    about = {} if probed is None else dict(probed["about"])
    return ProbeSession(folder / "profile", {"model": "tiny"}).open(about)


def endpoint_again(folder: Path) -> Any:
    from servesim.calibrate.endpoint.answers import LoadLine, loads_of
    from servesim.calibrate.endpoint.fit import NotEnoughData, fit_steps
    from servesim.calibrate.endpoint.steps import observed_steps
    from servesim.study.journal import Journal

    with Journal(folder / "endpoint/answers.jsonl", LoadLine) as journal:
        good = [load for load in loads_of(journal.records) if load.failure is None]
    with suppress(NotEnoughData):
        fit_steps(observed_steps(good))


def load(folder: Path) -> Any:
    import servesim

    loaded: Any = servesim.load(folder / "live")
    return loaded.requests, loaded.decisions, loaded.time_breakdown, servesim.load(folder / "sweep")


def sim(*words: str) -> Callable[[Path], int]:
    """Return a command; DIR in its words stands for the folder."""
    return lambda folder: sweeps.sim(*(word.replace("DIR", str(folder)) for word in words))


SWEEP = ("sweep/experiment.json", "sweep/runs.jsonl")
SEARCH = ("search/search.json", "search/runs.jsonl")
LIVE = tuple(f"live/{name}" for name in (
    "manifest.json", "result.json", "requests.csv", "decisions.jsonl.gz", "sent.jsonl", "steps.csv",
))  # fmt: skip
CASES: dict[str, tuple[Callable[[Path], int], tuple[str, ...]]] = {
    "verify": (sim("verify", "DIR/sim", "DIR/live"), LIVE),
    "verify sim": (sim("verify", "DIR/sim", "DIR/live"), tuple(f"sim/{n.partition('/')[2]}" for n in LIVE[:4])),
    "compare runs": (sim("compare", "DIR/sim", "DIR/live", "-j", "1", "-q"), LIVE[:4]),
    "compare sweep": (sim("compare", "DIR/sweep", "DIR/sweep:0", "-j", "1", "-q"), SWEEP),
    "report": (sim("report", "DIR/sweep"), SWEEP),
    "load": (reads(load), (*LIVE, *SWEEP)),
    "resume": (sim("sweep", "DIR/sweep.yaml", "-o", "DIR/sweep", "--resume", *map(str, QUIET)), SWEEP),
    "continue": (sim("sweep", "DIR/sweep", *map(str, QUIET)), SWEEP),
    "search": (sim("search", "DIR/search.yaml", "-o", "DIR/search", "--resume", *map(str, QUIET)), SEARCH),
    "run best": (sim("run", "DIR/sweep/best.yaml"), ("sweep/best.yaml",)),
    "replay --from": (reads(top), ("sweep/summary.csv", "sweep/experiment.json")),
    "check": (sim("calibrate", "check", "DIR/profile"), ("profile/profile.yaml", "profile/samples.csv")),
    "check vidur": (sim("calibrate", "check", "DIR/vidur"), ("vidur/profile.yaml", "vidur/tables.npz")),
    "run vidur": (sim("run", "DIR/sweep/best.yaml", "--profile", "DIR/vidur"), ("vidur/tables.npz",)),
    "run profile": (
        sim("run", "DIR/sweep/best.yaml", "--profile", "DIR/profile", "--set", "noise=true"), ("profile/profile.yaml",)
    ),
    "fit": (sim("calibrate", "fit", "DIR/profile"), ("profile/probe.yaml", "profile/samples.csv")),
    "probe --resume": (reads(probe_again), ("profile/probe.yaml", "profile/samples.csv")),
    "endpoint --resume": (reads(endpoint_again), ("endpoint/answers.jsonl",)),
}  # fmt: skip


def make_profiles(folder: Path) -> None:
    """Write a small probed profile and one of Vidur's tables."""
    source = bundled_profiles()["cpu-tiny-kbk"]
    tree = yaml.safe_load((source / "profile.yaml").read_text())
    about = {key: tree[key] for key in ("device", "kernels", "dtype", "model")}
    (folder / "profile").mkdir()
    (folder / "profile/profile.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    (folder / "profile/probe.yaml").write_text(yaml.safe_dump({"settings": {"model": "tiny"}, "about": about}))
    packed = source / "samples.csv.gz"
    text = gzip.decompress(packed.read_bytes()).decode() if packed.exists() else (source / "samples.csv").read_text()
    rows = list(csv.reader(text.splitlines()))
    with open(folder / "profile/samples.csv", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([rows[0], *rows[1::36]])
    (folder / "vidur").mkdir()
    (folder / "vidur/profile.yaml").write_text(yaml.safe_dump({"name": "v", "cost": {"kind": "vidur"}}))
    ramp = np.arange(1.0, 9.0)
    np.savez(
        folder / "vidur/tables.npz", layers=2, comp_ms_per_layer=ramp, kvsave_ms_per_layer=ramp,
        attn_decode_ms_per_layer=np.outer(ramp, ramp), attn_prefill_ms_per_layer=np.outer(ramp, ramp),
    )  # fmt: skip


def make_endpoint(folder: Path) -> None:
    """Write the files of an endpoint calibration."""
    from servesim.calibrate.client.load_generator import SentRequest
    from servesim.calibrate.endpoint.answers import LoadLine, LoadResult
    from servesim.calibrate.endpoint.load_plan import Point
    from servesim.core import Request
    from servesim.study.journal import Journal

    loads = []
    for number, prompt in enumerate((16, 64, 256, 1024)):
        first = 0.02 + 1e-4 * prompt
        times = [first + 0.01 * k for k in range(6)]
        request = Request(f"r{number}", 0.0, prompt, 6)
        sent = SentRequest(request, 0.0, 0.0, times, 6, prompt, times[-1], "finished", None)
        loads.append(LoadResult(Point("single", 1, prompt), 0, [sent]).record({"url": "u"}))
    (folder / "endpoint").mkdir()
    with Journal(folder / "endpoint/answers.jsonl", LoadLine) as journal:
        journal.append(loads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with undamaged folders of every kind."""
    pytest.importorskip("optuna", reason="needs the extra `search` (optuna)")
    folder = tmp_path_factory.mktemp("whole")
    small = {"base": sweeps.base(workload=sweeps.workload(6)), "params": {"policy.decode_batch": [2, 4]}}
    file = sweeps.sweep_file(folder, **small, replications=2)
    assert sweeps.sim("sweep", file, "-o", folder / "sweep", *QUIET) == 0
    search = search_file(folder, **small, trials=4, batch=2)
    assert sweeps.sim("search", search, "-o", folder / "search", *QUIET) == 0
    words = ("--backend", "fake", "--model", "tiny", "--warm-up", 0, "--quiet", "-o", folder)
    assert sweeps.sim("replay", folder / "sweep/best.yaml", *words, "--time-scale", 0.01) == 0
    make_profiles(folder)
    make_endpoint(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_undamaged_folders_are_read(case: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, _ = CASES[case]
    code = command(copy_folder(whole, tmp_path / "x"))
    error = capsys.readouterr().err
    assert code == 0, error


@pytest.mark.parametrize("part", seeds(1, 4))
@pytest.mark.parametrize("case", CASES)
def test_a_damaged_folder_gives_one_line(
    case: str, part: int, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, files = CASES[case]
    rng = random.Random(f"{case} {part}")
    for number in range(part * MUTATIONS, (part + 1) * MUTATIONS):
        folder = copy_folder(whole, tmp_path / "x")
        path = folder / files[number % len(files)]
        what = f"{case}, mutation {number}: {path.name}: {damage(path, rng)}"
        try:
            code = command(folder)
        except Exception as error:
            raise AssertionError(what) from error
        out = capsys.readouterr()
        assert code in (0, 1, 2, 3), what
        assert code != 2 or (out.err.startswith("sim: ") and out.err.count("\n") == 1), f"{what}: {out.err}"
