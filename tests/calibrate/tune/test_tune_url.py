"""`sim tune --url`: factors of step times from request times, and one server configuration at a time."""

from __future__ import annotations

import csv
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

pytest.importorskip("aiohttp")
from servesim.cli import main
from servesim.costs.device_profile import load_profile

from ..server.serving import service
from .problems import TRUE_COST, cheap_decodes, sweep_tree, write_sweep


def url_command(file: Path, folder: Path, port: int) -> list[str]:
    url = f"http://127.0.0.1:{port}"
    return ["tune", str(file), "-o", str(folder), "--url", url, "-j", "1", "--quiet", "--draws", "4"]


COST = {name: 4 * value for name, value in TRUE_COST.items()}  # long steps, so that HTTP adds little


def baseline_tree() -> dict[str, object]:
    tree = sweep_tree(
        cheap_decodes(COST), rate=12, requests=30, params={"policy.decode_batch": [4, 8, 16]}, objectives=["makespan"]
    )
    tree["base"]["engine"]["decode_buckets"] = [1]  # `sim serve` does not pad
    return tree


@pytest.mark.live
def test_request_times_give_a_factor_per_kind_of_step_and_the_next_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The decodes of the profile are 20 % too cheap; the server runs the baseline, then the written configuration."""
    file, folder = write_sweep(tmp_path, baseline_tree()), tmp_path / "tuned"
    policy = {"name": "llm-serving", "decode_batch": 8, "prefill_batch": 1}
    with service(policy=policy, cost=COST) as server:
        assert main(url_command(file, folder, server.port)) == 0
        out = capsys.readouterr().out
        assert "winner:" not in out  # only the baseline was measured
        assert f"next: start the server with {folder / 'next.yaml'}, then run this command again with --resume" in out
        first = next(csv.DictReader((folder / "rounds.csv").open()))
        assert first["measured"] == "config0-baseline"
        assert float(first["decode_factor"]) == pytest.approx(1.25, rel=0.08)
        assert "two factors were fitted to the request times" in str(load_profile(folder / "profile").about["how"])
        command = url_command(file, folder, server.port)
    scenario = yaml.safe_load((folder / "next.yaml").read_text())
    assert scenario["policy"]["decode_batch"] == 16
    with service(policy=scenario["policy"], cost=COST) as server:
        command[command.index("--url") + 1] = f"http://127.0.0.1:{server.port}"
        assert main([*command, "--resume"]) == 0
    rounds = list(csv.DictReader((folder / "rounds.csv").open()))
    assert rounds[1]["measured"] == "config2"
    assert float(rounds[1]["objective_error"]) < 0.05  # the correction from the baseline predicts another configuration


@pytest.mark.slow
def test_with_a_restart_command_all_configurations_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command receives the scenario file. Here it only notes it and waits: the server stays as it is."""
    monkeypatch.chdir(tmp_path)
    file, folder = write_sweep(tmp_path, baseline_tree()), Path("tuned")
    notes, wait = tmp_path / "restarts.txt", 10.0
    with service(policy={"name": "llm-serving", "decode_batch": 16, "prefill_batch": 1}, cost=COST) as server:
        command = url_command(file, folder, server.port)
        start = time.perf_counter()
        assert main([*command, "--restart", f'cd / && echo "$SCENARIO" >> {notes}; sleep {wait}', "--rounds", "1"]) == 0
        whole = time.perf_counter() - start
    assert "winner: tuned/best.yaml (measured)\n" in capsys.readouterr().out
    restarted = notes.read_text().split()
    assert all(Path(name).is_absolute() and Path(name).is_file() for name in restarted)
    first = next(csv.DictReader((folder / "rounds.csv").open()))
    assert float(first["device_s"]) <= whole - wait * len(restarted)  # without the restarts
    assert [Path(name).name for name in restarted][:2] == ["round1-config2.yaml", "round1-config0-baseline.yaml"]
    assert yaml.safe_load(Path(restarted[0]).read_text())["policy"]["decode_batch"] == 16


class Broken(BaseHTTPRequestHandler):
    """A server whose engine is dead: it answers every request with an error."""

    def do_POST(self) -> None:
        self.send_error(500)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_a_measurement_without_a_finished_request_is_not_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = write_sweep(tmp_path, baseline_tree()), tmp_path / "tuned"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Broken)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        command = [*url_command(file, folder, server.server_port), "--served-model", "m"]
        assert main(command) == 2
        assert main([*command, "--resume"]) == 2
    finally:
        server.shutdown()
        server.server_close()
    lines = capsys.readouterr().err.splitlines()
    text = "sim: config0-baseline: no request was finished, so the measurement does not count; see "
    assert lines == [f"{text}{folder / 'live' / 'round1-config0-baseline'}"] * 2
    assert '"measured"' not in (folder / "tune.jsonl").read_text()
