"""Device counters: outputs of nvidia-smi and npu-smi, and runs beside a tool that works, fails or hangs."""

from __future__ import annotations

import csv
import gzip
import json
import os
import time
from pathlib import Path
from typing import cast

import pytest
import yaml
from servesim.calibrate.device.counters import DeviceSampler, parse_npu, parse_nvidia
from servesim.calibrate.device.worker_client import Worker
from servesim.calibrate.probe.power import measure_power
from servesim.calibrate.probe.session import ProbeSession, read_probe, run_session
from servesim.cli import main

from ...events import PATIENCE_S, wait_until
from .worker_here import WorkerHere

USAGES = """\
\tNPU ID                         : 0
\tChip Count                     : 1

\tDDR Capacity(MB)               : 0
\tDDR Usage Rate(%)              : 0
\tHBM Capacity(MB)               : 32768
\tHBM Usage Rate(%)              : 75
\tAicore Usage Rate(%)           : 83
\tAivector Usage Rate(%)         : 12
\tAicpu Usage Rate(%)            : 0
\tCtrlcpu Usage Rate(%)          : 2
\tDDR Bandwidth Usage Rate(%)    : 0
\tHBM Bandwidth Usage Rate(%)    : 41
\tChip ID                        : 0
"""
POWER = "\tNPU ID                         : 0\n\tNPU Real-time Power(W)         : 161.2\n\tChip ID                : 0\n"
WORKING = "#!/bin/sh\nwhile true; do echo '87, 45, 15360, 500.00'; sleep 0.05; done\n"
HANGING = "#!/bin/sh\nexec sleep 600\n"
FAILING = "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver.'\nexit 9\n"
NPU = f"""#!/bin/sh
if [ "$3" = usages ]; then
cat <<'END'
{USAGES}END
else
cat <<'END'
{POWER}END
fi
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that hides the tools of the machine: PATH has only it and the folders of `sh` and `sleep`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "sleep", "cat"):
        source = next(Path(path, name) for path in os.environ["PATH"].split(":") if Path(path, name).exists())
        (folder / name).symlink_to(source)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def add_tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def wait_for_sample(sampler: DeviceSampler) -> None:
    wait_until(lambda: sampler.samples, "a sample")


def test_a_line_of_nvidia_smi() -> None:
    assert parse_nvidia(2.0, "98, 61, 71234, 612.45\n") == (2.0, 98.0, 61.0, 71234.0, 612.45)
    assert parse_nvidia(2.0, "98, [N/A], 71234, [Not Supported]\n") == (2.0, 98.0, None, 71234.0, None)
    assert parse_nvidia(2.0, "Unable to determine the device handle for GPU0: Unknown Error\n") is None
    assert parse_nvidia(2.0, "[N/A], [N/A], [N/A], [N/A]\n") is None and parse_nvidia(2.0, "") is None


def test_outputs_of_npu_smi() -> None:
    assert parse_npu(1.0, USAGES + POWER) == (1.0, 83.0, 41.0, 24576.0, 161.2)
    assert parse_npu(1.0, USAGES) == (1.0, 83.0, 41.0, 24576.0, None)
    older = "\tPower Dissipation(W)           : 68.0\n\tAicore Usage Rate(%)           : 5\n"
    assert parse_npu(1.0, older) == (1.0, 5.0, None, None, 68.0)
    two_chips = f"{USAGES}\tAicore Usage Rate(%)           : 7\n\tChip ID                        : 1\n"
    assert parse_npu(1.0, two_chips) == (1.0, 83.0, 41.0, 24576.0, None)
    assert parse_npu(1.0, "dcmi module initialize failed. ret is -8005\n") is None


@pytest.mark.parametrize(("tool", "text", "power"), [("nvidia-smi", WORKING, 500.0), ("npu-smi", NPU, 161.2)])
def test_a_tool_gives_samples_until_the_end(
    tools: Path, tool: str, text: str, power: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servesim.calibrate.device.counters.TIMEOUT_S", PATIENCE_S)
    add_tool(tools, tool, text)
    with DeviceSampler() as sampler:
        wait_for_sample(sampler)
    assert sampler.tool == tool and sampler.remark is None
    assert sampler.samples[0].power == power and sampler.samples[0].time <= time.perf_counter()


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        (HANGING, "device counters: nvidia-smi gave no samples: it printed nothing"),
        (FAILING, "device counters: nvidia-smi gave no samples: NVIDIA-SMI has failed because it could not"),
        ("not a program", "device counters: nvidia-smi gave no samples: "),
    ],
    ids=["hangs", "fails", "cannot run"],
)
def test_a_tool_that_does_not_work_is_one_line(tools: Path, text: str, remark: str) -> None:
    add_tool(tools, "nvidia-smi", text)
    sampler = DeviceSampler()
    sampler.start()
    if text == FAILING:
        sampler._thread.join(PATIENCE_S)
    start = time.monotonic()
    sampler.stop()
    assert time.monotonic() - start < PATIENCE_S  # half of what the hanging tool takes
    assert sampler._process is None or sampler._process.poll() is not None
    assert sampler.remark is not None and sampler.remark.startswith(remark) and "\n" not in sampler.remark


@pytest.mark.live
def test_power_by_kind_needs_samples(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servesim.calibrate.probe.power.PHASE_S", 0.5)
    monkeypatch.setattr("servesim.calibrate.probe.power.SETTLE_S", 0.1)
    ran: list[str] = []

    def fails() -> None:
        ran.append("failed")
        raise RuntimeError("out of memory")

    steps = {"prefill": [lambda: ran.append("prefill"), fails], "decode": [lambda: time.sleep(0.01)]}
    assert measure_power(steps, DeviceSampler()) is None and not ran
    add_tool(tools, "nvidia-smi", WORKING)
    with DeviceSampler() as sampler:
        wait_for_sample(sampler)
        power = measure_power(steps, sampler)
    assert power is not None and {key: power[key] for key in ("idle", "prefill", "decode")} == dict.fromkeys(
        ("idle", "prefill", "decode"), 500.0
    )
    assert "mixed" not in power and "nvidia-smi" in power["source"]
    assert ran.count("failed") == 1 and ran.count("prefill") > 1


@pytest.mark.live
def test_a_probe_keeps_the_counters_and_the_power_of_each_kind(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servesim.calibrate.probe.power.PHASE_S", 0.5)
    monkeypatch.setattr("servesim.calibrate.probe.power.SETTLE_S", 0.1)
    add_tool(tools, "nvidia-smi", WORKING)
    settings = {"backend": "fake", "budget": 2.0, "max_rows": 2, "max_tokens": 32, "max_seq_len": 64}
    session = ProbeSession(tmp_path / "probe", settings)
    worker = WorkerHere(cost={"base": 0.001})
    worker.load("tiny", 64, 16, 8)
    result = run_session(cast(Worker, worker), session, True)
    rows = list(csv.DictReader((tmp_path / "probe" / "device.csv").open()))
    assert len(rows) == len(result["counters"]["samples"]) > 0
    about = (read_probe(tmp_path / "probe") or {})["about"]
    assert {kind: about["power"][kind] for kind in ("idle", "prefill", "decode", "mixed")} == dict.fromkeys(
        ("idle", "prefill", "decode", "mixed"), 500.0
    )


def replay(folder: Path) -> int:
    lengths = {"prompt": 20, "output": 10}
    scenario = {
        "workload": {"requests": 12, "arrivals": {"kind": "poisson", "rate": 10}, "lengths": lengths},
        "policy": {"name": "llm-serving", "decode_batch": 8},
        "engine": {"num_blocks": 60, "block_size": 8},
        "profile": {"base": 0.01},
    }
    (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    return main(["replay", str(folder / "scenario.yaml"), "--backend", "fake", "--live-only", "-o", str(folder / "r")])


@pytest.mark.live
def test_a_replay_writes_counters_timeline_and_energy(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_tool(tools, "nvidia-smi", WORKING)
    assert replay(tmp_path) == 0
    live = tmp_path / "r" / "live"
    rows = list(csv.DictReader((live / "device.csv").open()))
    assert {row["power_w"] for row in rows} == {"500.0"} and {row["utilisation_percent"] for row in rows} == {"87.0"}
    result = json.loads((live / "result.json").read_text())
    end = max(float(row["end"]) for row in csv.DictReader((live / "steps.csv").open()))
    assert result["device"]["energy_j"] == pytest.approx(500.0 * end)
    assert result["energy"] == pytest.approx(1000 * 500.0 * end / result["total_output_tokens"])
    events = json.loads(gzip.decompress((live / "timeline.json.gz").read_bytes()))["traceEvents"]
    power = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "power (W)"]
    assert power == [{"power": 500.0}] * len(rows)
    steps = [event for event in events if event["ph"] == "X"]
    assert len(steps) == result["model_calls"] and {event["name"] for event in steps} <= {"prefill", "decode"}
    slices = [event for event in events if event["ph"] in "be"]
    assert sum(event["ph"] == "b" for event in slices) == sum(event["ph"] == "e" for event in slices) == 36
    output = capsys.readouterr()
    assert "device counters (nvidia-smi, " in output.out and "device counters" not in output.err
