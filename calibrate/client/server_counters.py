"""What a server says itself: models, vLLM's version and settings, counters before and after a load; and the round trip.

A client sees no preemptions, and its latencies include the network, HTTP and its own delays. The counters of the server
have both without them. `sim serve` has the same names.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any, Optional
from urllib.error import HTTPError, URLError
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from servesim.core import BadInput

from .protocols import key_header

PREEMPTIONS = "vllm:num_preemptions_total"
CACHED_TOKENS = "vllm:prefix_cache_hits_total"
COUNTS = {
    "preemptions": PREEMPTIONS, "cached_tokens": CACHED_TOKENS,
    "drafted": "vllm:spec_decode_num_draft_tokens_total", "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}  # fmt: skip
LATENCIES = {"mean_ttft_ms": "vllm:time_to_first_token_seconds", "mean_e2el_ms": "vllm:e2e_request_latency_seconds"}
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"  # with a label `position`, from 0
LATER_OUTPUTS = "vllm:inter_token_latency_seconds_count"  # steps that gave a request tokens, but its first one
SAMPLE = re.compile(r'^(vllm:\w+)(?:\{(?:.*,)?(?:position="(\d+)")?.*\})? (\S+)$', re.MULTILINE)
SETTINGS = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
TIMEOUT_S, MODELS_TIMEOUT_S = 10.0, 30.0  # without a list of models, most commands cannot start
ROUND_TRIPS = 5
NULL_BLOCKS = 1  # KV blocks that vLLM V1 counts but never gives to a request
ServerCounts = Mapping[str, float]


def ask(url: str, path: str, timeout: float = TIMEOUT_S) -> bytes:
    """Return the answer of a server to a GET."""
    with urlopen(HttpRequest(url.rstrip("/") + path, headers=key_header()), timeout=timeout) as response:
        return bytes(response.read())


def list_models(url: str) -> list[dict[str, Any]]:
    """Return the models that a server lists, at least one."""
    try:
        models = json.loads(ask(url, "/v1/models", MODELS_TIMEOUT_S))["data"]
        return [{**model, "id": str(model["id"])} for model in (models[0], *models[1:])]
    except (URLError, OSError, ValueError, LookupError, TypeError) as error:
        reason = getattr(error, "reason", None) or error  # of a URLError, whose own text is for programmers
        raise BadInput(
            f"--url {url}: cannot list the models ({reason}); is the server running? If so, set --served-model"
        ) from None


def served_model(url: str, name: Optional[str]) -> tuple[str, Optional[int]]:
    """Return the model to ask for, by default the first one, and its max_model_len if the server lists it."""
    try:
        models = list_models(url)
    except BadInput:
        if name is None:
            raise
        return name, None  # not every server lists its models
    listed = next((model for model in models if name in (None, model["id"])), None)
    if listed is None:
        known = ", ".join(model["id"] for model in models)
        raise BadInput(f"--served-model {name}: the server at {url} has no such model; it has {known}")
    length = listed.get("max_model_len")
    return listed["id"], length if isinstance(length, int) and length > 0 else None


def vllm_version(url: str) -> Optional[str]:
    """Return the version of a vLLM server without a suffix such as +cpu; None if it is another server."""
    try:
        models, version = (json.loads(ask(url, path)) for path in ("/v1/models", "/version"))
        is_vllm = any(model.get("owned_by") == "vllm" for model in models["data"])
        return str(version["version"]).partition("+")[0] if is_vllm else None
    except (OSError, ValueError, HTTPException, LookupError, TypeError, AttributeError):
        return None


def read_settings(url: str) -> dict[str, Any]:
    """Return what a vLLM server says about itself: version, block_size, num_blocks, prefix_cache; unknown ones not."""
    found: dict[str, Any] = {}
    if (version := vllm_version(url)) is not None:
        found["version"] = version
    labels = dict(LABEL.findall("".join(SETTINGS.findall(read_metrics(url))[:1])))  # of the first engine
    for key, label in (("block_size", "block_size"), ("num_blocks", "num_gpu_blocks")):
        if labels.get(label, "").isdecimal():
            found[key] = int(labels[label])
    if "num_blocks" in found and "engine" in labels:  # V1
        found["num_blocks"] -= NULL_BLOCKS
    if labels.get("enable_prefix_caching") in ("True", "False"):
        found["prefix_cache"] = labels["enable_prefix_caching"] == "True"
    return found


def read_metrics(url: str) -> str:
    """Return the text at /metrics; empty without an answer."""
    try:
        return ask(url, "/metrics").decode("utf-8", "replace")
    except (OSError, ValueError, HTTPException):
        return ""


def read_counters(url: str) -> ServerCounts:
    """Return vLLM's counters of a server, summed over its engines; empty if it has none."""
    try:
        return parse_metrics(read_metrics(url))
    except ValueError:
        return {}


def parse_metrics(text: str) -> ServerCounts:
    """Return the metrics of vLLM in a text, summed over their labels but `position`: name/0. Raises ValueError."""
    counters: dict[str, float] = {}
    for name, position, value in SAMPLE.findall(text):
        name = f"{name}/{position}" if position else name
        counters[name] = counters.get(name, 0.0) + float(value)
    return {name: value for name, value in counters.items() if math.isfinite(value)}


def add_counters(each: Sequence[ServerCounts]) -> ServerCounts:
    """Return the sums of the counters of several servers."""
    return {name: sum(counts.get(name, 0.0) for counts in each) for counts in each for name in counts}


def counted_between(before: ServerCounts, after: ServerCounts, finished: int) -> dict[str, Any]:
    """Return what a server counted between two readings, in which `finished` requests of this client ended.

    Its latencies are means over all requests: they are left out if it also served other clients. Counts that it does
    not have are left out too.
    """
    change = {name: after[name] - before.get(name, 0.0) for name in (after if before else ())}
    if any(value < 0 for name, value in change.items() if name.endswith(("_total", "_count"))):
        return {}  # it was restarted
    counted: dict[str, Any] = {}
    for key, name in COUNTS.items():
        if name in change:
            counted[key] = round(change[name])
    for key, name in LATENCIES.items():
        requests = round(change.get(f"{name}_count", 0))
        if requests:
            counted["requests"] = requests
        if requests == finished > 0 and f"{name}_sum" in change:
            counted[key] = 1e3 * change[f"{name}_sum"] / requests
    return counted


def speculation_between(before: ServerCounts, after: ServerCounts) -> Optional[dict[str, Any]]:
    """Return the drafts of a server between two readings as keys of the section `speculative`; None if it had none.

    The acceptance of a position is the share of drafts that were accepted up to it.
    """
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    drafts = change.get(DRAFTS, 0.0)
    accepted: list[float] = []
    while f"{ACCEPTED_AT}/{len(accepted)}" in change:
        accepted.append(change[f"{ACCEPTED_AT}/{len(accepted)}"])
    if drafts <= 0 or not accepted or min(accepted) < 0:
        return None
    rates = [round(min(1.0, count / drafts), 4) for count in accepted]
    return {
        "tokens": len(rates),
        "acceptance": rates,
        "proposals": round(min(1.0, drafts / (change.get(LATER_OUTPUTS) or drafts)), 4),
    }


def round_trip_ms(url: str) -> Optional[float]:
    """Return the median milliseconds of some small requests that need no model call; None without an answer."""
    times = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        try:
            ask(url, "/health")
        except HTTPError as error:  # also an answer: not every server has this path
            error.close()
        except (OSError, ValueError, HTTPException):
            return None
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)
