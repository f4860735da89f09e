"""The recorded steps of a vLLM server: its version and settings as a scenario, and the time of its front end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, get_args

import numpy as np
from servesim.calibrate.client.load_generator import LoadGenerator
from servesim.calibrate.client.server_counters import ServerCounts, speculation_between
from servesim.config.layers import read_scenario_file
from servesim.config.speculative import Speculative
from servesim.core import BadInput, field_values
from servesim.costs.model_config import KEYS
from servesim.files.read import parse_json, quote
from servesim.files.step_table import MeasuredStep, read_steps
from servesim.policies.vllm_v1.policy import VLLMV1
from servesim.policies.vllm_v1.settings import NEWEST, OLDEST, SETTING_SINCE, is_version, version_number

HEADER_TIMEOUT_S = 10.0
WRITTEN_S = 0.5  # until the recorder has written the last step
METHODS = get_args(Speculative.model_fields["method"].annotation)  # of speculative decoding, which are simulated
UNSIMULATED = {  # settings that change decisions, and their values without effect
    ("parallel", "data_parallel_size"): 1,
    ("parallel", "pipeline_parallel_size"): 1,
    ("scheduler", "prefill_schedule_interval"): 1,
    ("cache", "kv_offloading_size"): None,
    ("cache", "sliding_window"): None,
}


@dataclass(frozen=True)
class Recording:
    """A step log that a server writes while it runs."""

    path: Path
    header: Mapping[str, Any]

    @property
    def version(self) -> str:
        """The version of vLLM, without a suffix such as +cpu."""
        return str(self.header["version"]).partition("+")[0]

    @property
    def simulated_version(self) -> str:
        """The nearest version whose rules are simulated."""
        found = re.match(r"\d+\.\d+\.\d+", self.version)
        number = version_number(found[0]) if found and is_version(found[0]) else NEWEST
        return ".".join(map(str, min(max(number, OLDEST), NEWEST)))

    @property
    def unsimulated(self) -> list[str]:
        """The settings of the server that are not simulated."""
        method, scheduler = self.header.get("speculative", {}).get("method"), self.header["scheduler"]
        found = [f"{name}_config" for name in self.header["features"] if name != "speculative" or method not in METHODS]
        most = scheduler.get("max_num_scheduled_tokens")
        if most not in (None, scheduler.get("max_num_batched_tokens")):  # the same with speculative decoding
            found.append(f"max_num_scheduled_tokens={most}")
        for (section, name), neutral in UNSIMULATED.items():
            value = self.header[section].get(name, neutral)
            if value not in (neutral, None):
                found.append(f"{name}={value}")
        return found

    @property
    def max_model_len(self) -> int:
        return int(self.header["model"]["max_model_len"])

    @property
    def vocabulary(self) -> Optional[int]:
        """The number of token ids; None if the server does not know it."""
        size: Optional[int] = self.header["model_sizes"].get("vocab_size")
        return size

    @property
    def model_name(self) -> str:
        """The last part of the path or name of the model."""
        return Path(str(self.header["model"]["model"])).name

    @property
    def model(self) -> Any:
        """The key `model` of a profile: the sizes if the server knows them all, else the name."""
        sizes, name = self.header["model_sizes"], self.model_name
        known = {key: sizes.get(own) for key, own in KEYS.items()}
        known["kv_heads"] = known["kv_heads"] or known["heads"]
        return {"name": name, **known} if all(known.values()) else name

    def scenario(self, profile: str, workload: Mapping[str, Any]) -> dict[str, Any]:
        """Return a scenario with the settings of the server. V1 never uses the first block."""
        scheduler, version = self.header["scheduler"], self.simulated_version
        later = {name for name, first in SETTING_SINCE.items() if version_number(version) < first}
        defaults = field_values(VLLMV1())  # their names are those of vLLM
        fields = {name: scheduler[name] for name in defaults if name in scheduler and name not in later}
        fields.update({name: False for name in later if defaults[name]})
        fields["enable_prefix_caching"] = bool(self.header["cache"].get("enable_prefix_caching"))
        return {
            "workload": dict(workload),
            "policy": {"name": "vllm-v1", "version": version, **fields},
            "engine": {
                "num_blocks": self.header["num_blocks"] - 1,
                "block_size": self.header["block_size"],
                "max_model_len": self.max_model_len,
            },
            "profile": profile,
        }

    def speculative(self, before: ServerCounts, after: ServerCounts) -> dict[str, Any]:
        """Return the section `speculative` of a scenario, from the counters of the server around a load; {}: none."""
        section = speculation_between(before, after)
        if section is None:
            return {}
        method = self.header.get("speculative", {}).get("method")
        if method is not None and method != "ngram":  # the others always have drafts
            del section["proposals"]
        return {"speculative": {**({} if method is None else {"method": method}), **section}}

    def changed_settings(self, file: Path) -> list[str]:
        """Return the settings of the server that differ from those of a scenario file."""
        tree = read_scenario_file(file)
        ours = self.scenario(tree["profile"], tree["workload"])
        return [
            f"{section}.{name}: {value}, not {tree[section].get(name)}"
            for section in ("policy", "engine")
            for name, value in ours[section].items()
            if value != tree[section].get(name)
        ]

    def steps(self) -> list[MeasuredStep]:
        """Return the steps so far."""
        time.sleep(WRITTEN_S)
        return read_steps(self.path)


def open_recording(path: Path) -> Recording:
    """Return the recording of a running server; wait a moment for its first line."""
    if not path.exists():
        raise BadInput(f"{path}: no such file; expected that of vLLM's recorder (SERVESIM_STEPS of the server)")
    deadline = time.monotonic() + HEADER_TIMEOUT_S
    while b"\n" not in path.read_bytes()[:1_000_000]:
        if time.monotonic() > deadline:
            raise BadInput(f"{path}: expected the steps of vLLM's recorder, got an empty file")
        time.sleep(0.2)
    with path.open(encoding="utf-8") as file:
        header = parse_json(path, file.readline(), 1)
    content = header.get("header") if isinstance(header, dict) else None
    if not isinstance(content, dict) or content.get("engine") != "vllm":
        raise BadInput(f"{path}: row 1: expected the header of vLLM's recorder, got {quote(header)}")
    return Recording(path, content)


def listed(step: MeasuredStep, column: str) -> list[Any]:
    """Return a column that holds a list; empty if the recorder has not written it."""
    found: list[Any] = json.loads(step.cells.get(column) or "[]")
    return found


def seconds_per_request(steps: Sequence[MeasuredStep], sizes: Sequence[int]) -> float:
    """Return the mean time from one request of a burst to the next in the front end; 0 if it was not recorded.

    `sizes`: requests of each burst. The front end stamps a request when it gets it, often several in one go.
    """
    stamps = sorted(row[2] for step in steps for row in listed(step, "arrived"))
    if len(stamps) != sum(sizes):
        return 0.0  # an older recorder, or requests of other clients
    ends = np.cumsum(sizes)
    spans = [stamps[end - 1] - stamps[end - size] for end, size in zip(ends, sizes)]
    return float(sum(spans) / max(1, sum(sizes) - len(sizes)))


def seconds_outside(load: LoadGenerator, steps: Sequence[MeasuredStep]) -> Optional[float]:
    """Return the median time outside the engine until the first token, of requests that were sent one by one."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for step in steps:
        for id in step.requests:
            first.setdefault(id, step.start or 0.0)
            last[id] = step.end or 0.0
    answered = [one for one in load.sent_requests if one.times and one.sent_at is not None]
    if not answered or len(first) != len(answered):
        return None  # other clients
    pairs = zip(answered, first)
    outside = [one.times[0] - (one.sent_at or 0.0) - (last[id] - first[id]) for one, id in pairs]
    return max(0.0, float(np.median(outside)))
