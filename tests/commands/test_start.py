"""What a command must not load before it does its work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from servesim.costs.device_profile import bundled_profiles

SLOW = {"pandas", "scipy", "matplotlib", "jinja2", "optuna", "aiohttp", "distributed"}
RUN = """
import sys
from servesim.cli import main
assert main(["run", sys.argv[1], "-q"]) == 0
print("loaded:", *{name.partition(".")[0] for name in sys.modules})
"""
SCENARIO = """
profile: h200-llama2-7b
policy: vllm-v1
workload: {requests: 10, arrivals: {kind: poisson, rate: 5}, lengths: {prompt: 200, output: 50}}
"""


def test_a_run_of_ten_requests_loads_no_library_of_reports_and_studies(tmp_path: Path) -> None:
    (tmp_path / "ten.yaml").write_text(SCENARIO)
    ended = subprocess.run(
        [sys.executable, "-Ic", RUN, str(tmp_path / "ten.yaml")], capture_output=True, text=True, check=True
    )
    loaded = set(ended.stdout.splitlines()[-1].split())
    assert "numpy" in loaded and not SLOW & loaded


def test_the_folder_of_bundled_profiles_is_read_once() -> None:
    assert bundled_profiles() is bundled_profiles()
