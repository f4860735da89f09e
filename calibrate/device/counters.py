"""Utilisation, memory and power of the device during a run, sampled with nvidia-smi or npu-smi.

The sampler runs on the device's host, beside the run, and never delays or fails it: without a tool, or if the tool
fails, there are no samples and one line says why. Times are those of time.perf_counter. Standard library only, Python
3.9.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

INTERVAL_S = 0.1  # between two samples of nvidia-smi
TIMEOUT_S = 5.0  # of one call of npu-smi
STOP_S = 1.0  # longest wait for a tool that ends, and for its reader
NVIDIA_FIELDS = "utilization.gpu,utilization.memory,memory.used,power.draw"
NPU_KEYS = {  # keys of `npu-smi info -t usages` and `-t power`; the names differ between versions
    "utilisation": ("Aicore Usage Rate(%)",),
    "memory_busy": ("HBM Bandwidth Usage Rate(%)", "Memory Bandwidth Usage Rate(%)"),
    "power": ("NPU Real-time Power(W)", "Power Dissipation(W)"),
}
NO_TOOL = "device counters: neither nvidia-smi nor npu-smi found; utilisation, memory and power are not measured"


class Sample(NamedTuple):
    """The counters at one time; None: the tool does not report it."""

    time: float  # seconds
    utilisation: Optional[float]  # percent: time with a kernel running (GPU), or busy AI cores (NPU)
    memory_busy: Optional[float]  # percent: time in which the memory was read or written
    memory: Optional[float]  # MB in use
    power: Optional[float]  # W


def number(text: Optional[str]) -> Optional[float]:
    """Return the number in a cell, None if it has none: [N/A], [Not Supported], a missing key."""
    try:
        value = float((text or "").split()[0])
    except (IndexError, ValueError):
        return None
    return value if 0 <= value < 1e9 else None


def parse_nvidia(at: float, line: str) -> Optional[Sample]:
    """Return the sample in a line of nvidia-smi, None if it is another line."""
    cells = line.split(",")
    if len(cells) != 4:
        return None
    sample = Sample(at, *(number(cell) for cell in cells))
    return sample if any(value is not None for value in sample[1:]) else None


def parse_npu(at: float, text: str) -> Optional[Sample]:
    """Return the sample in the output of npu-smi, of its first chip; None if it has no counters."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    values = {name: next((number(found[key]) for key in keys if key in found), None) for name, keys in NPU_KEYS.items()}
    capacity, used = number(found.get("HBM Capacity(MB)")), number(found.get("HBM Usage Rate(%)"))
    memory = None if capacity is None or used is None else capacity * used / 100
    if memory is None and all(value is None for value in values.values()):
        return None
    return Sample(at, values["utilisation"], values["memory_busy"], memory, values["power"])


class DeviceSampler:
    """Samples the counters in the background, from `start` to `stop`. Use it as a context manager."""

    def __init__(self) -> None:
        self.tool: Optional[str] = None  # nvidia-smi or npu-smi
        self.remark: Optional[str] = None  # one line: why there are no samples
        self.samples: list[Sample] = []  # so far, in the order of time
        self._process: Optional[subprocess.Popen[str]] = None  # the tool
        self._thread: Optional[threading.Thread] = None  # reads its output
        self._stop = threading.Event()
        self._last_line = ""  # of a tool that reported no sample

    def __enter__(self) -> DeviceSampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the first tool that exists."""
        self.tool = next((name for name in ("nvidia-smi", "npu-smi") if shutil.which(name)), None)
        if self.tool is None:
            self.remark = NO_TOOL
            return
        target = self._read_nvidia if self.tool == "nvidia-smi" else self._poll_npu
        self._thread = threading.Thread(target=target, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the tool and return at once, even if it hangs."""
        self._stop.set()
        if self._thread is None:
            return
        if self._process is not None:
            self._process.kill()
        self._thread.join(STOP_S)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            if self._process.stdout is not None and not self._thread.is_alive():
                self._process.stdout.close()
        if not self.samples:
            why = self._last_line[:160] or "it printed nothing"
            self.remark = f"device counters: {self.tool} gave no samples: {why}"

    def _open(self, command: Sequence[str]) -> Optional[subprocess.Popen[str]]:
        try:
            self._process = process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                encoding="utf-8", errors="replace",
            )  # fmt: skip
        except OSError as error:
            self._last_line = str(error)
            return None
        if self._stop.is_set():
            process.kill()
        return process

    def _add(self, sample: Optional[Sample], text: str) -> None:
        if sample is not None:
            self.samples.append(sample)
        elif text.strip():
            self._last_line = text.strip().splitlines()[0]

    def _read_nvidia(self) -> None:
        """Read the lines of one nvidia-smi that repeats its query."""
        process = self._open(
            [
                "nvidia-smi", f"--query-gpu={NVIDIA_FIELDS}", "--format=csv,noheader,nounits",
                f"--loop-ms={round(1000 * INTERVAL_S)}", "-i", device_index("CUDA_VISIBLE_DEVICES"),
            ]
        )  # fmt: skip
        if process is None or process.stdout is None:
            return
        with contextlib.suppress(OSError, ValueError):
            for line in process.stdout:
                self._add(parse_nvidia(time.perf_counter(), line), line)

    def _poll_npu(self) -> None:
        """Call npu-smi again and again: it cannot repeat a query."""
        device = device_index("ASCEND_RT_VISIBLE_DEVICES")
        while not self._stop.is_set():
            text = "".join(self._output(["npu-smi", "info", "-t", kind, "-i", device]) for kind in ("usages", "power"))
            self._add(parse_npu(time.perf_counter(), text), text)
            self._stop.wait(INTERVAL_S)

    def _output(self, command: Sequence[str]) -> str:
        process = self._open(command)
        if process is None:
            return ""
        try:
            return process.communicate(timeout=TIMEOUT_S)[0]
        except (subprocess.TimeoutExpired, OSError, ValueError):
            process.kill()
            return ""


def device_index(variable: str) -> str:
    """Return the first visible device, 0 if all are visible. It may also be an id like GPU-1a2b."""
    return os.environ.get(variable, "").split(",")[0].strip() or "0"


def counters_to_json(sampler: DeviceSampler, origin: float) -> dict[str, Any]:
    """Return the samples as JSON; times are seconds after `origin`."""
    rows = [[round(sample.time - origin, 6), *sample[1:]] for sample in sampler.samples]
    return {"tool": sampler.tool, "remark": sampler.remark, "samples": rows}
