"""GET /metrics: what the server does, as Prometheus text with the names of vLLM's metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Optional

import prometheus_client as prometheus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
OLD_NAMES = {  # in earlier versions of vLLM; dashboards still use them
    b"vllm:kv_cache_usage_perc": b"vllm:gpu_cache_usage_perc",
    b"vllm:inter_token_latency_seconds": b"vllm:time_per_output_token_seconds",
}
# Upper bounds of the histograms of vLLM.
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
NEXT_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


@dataclass
class RequestTimes:
    """When the tokens of a request arrived from the engine, in seconds of the monotonic clock."""

    prompt: int  # tokens
    submitted: float = field(default_factory=time.monotonic)
    first: float = 0.0  # valid if there are tokens
    last: float = 0.0
    tokens: int = 0


class ServerMetrics:
    """The metrics of one server."""

    def __init__(self, model: str) -> None:
        self.registry = prometheus.CollectorRegistry()
        self.labels = (model, "0")
        self.running = self._gauge("num_requests_running", "requests in model calls")
        self.waiting = self._gauge("num_requests_waiting", "requests in the waiting queue")
        self.swapped = self._gauge("num_requests_swapped", "requests swapped to host memory")
        self.cache_usage = self._gauge("kv_cache_usage_perc", "share of the KV blocks in use, 0 to 1")
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of requests with a first token")
        self.generation_tokens = self._counter("generation_tokens", "generated tokens")
        self._totals = {  # counters of the engine, by their key in its state
            "preemptions": self._counter("num_preemptions", "preemptions by the scheduler"),
            "prefix_cache_queries": self._counter(
                "prefix_cache_queries", "prompt tokens looked up in the prefix cache"
            ),
            "prefix_cache_hits": self._counter("prefix_cache_hits", "prompt tokens that the cache had"),
            "prefix_cache_evictions": self._counter("prefix_cache_evictions", "cached KV blocks reused for other text"),
        }
        self._counted = dict.fromkeys(self._totals, 0)  # at the last call of `text`
        self.ends = prometheus.Counter(
            "vllm:request_success", "requests that ended", (*LABELS, "finished_reason"), registry=self.registry
        )
        self.first_token = self._histogram("time_to_first_token_seconds", "from arrival to first token", FIRST_TOKEN_S)
        self.next_token = self._histogram("inter_token_latency_seconds", "between two tokens", NEXT_TOKEN_S)
        self.mean_next_token = self._histogram(
            "request_time_per_output_token_seconds", "mean of a request, without its first token", NEXT_TOKEN_S
        )
        self.latency = self._histogram("e2e_request_latency_seconds", "from arrival to last token", REQUEST_S)
        self.queue_time = self._histogram("request_queue_time_seconds", "from arrival to first model call", REQUEST_S)
        self.request_prompt = self._histogram("request_prompt_tokens", "prompt tokens of a request", TOKENS)
        self.request_output = self._histogram("request_generation_tokens", "generated tokens of a request", TOKENS)

    def _gauge(self, name: str, text: str) -> prometheus.Gauge:
        return prometheus.Gauge(f"vllm:{name}", text, LABELS, registry=self.registry).labels(*self.labels)

    def _counter(self, name: str, text: str) -> prometheus.Counter:
        return prometheus.Counter(f"vllm:{name}", text, LABELS, registry=self.registry).labels(*self.labels)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> prometheus.Histogram:
        histogram = prometheus.Histogram(f"vllm:{name}", text, LABELS, registry=self.registry, buckets=bounds)
        return histogram.labels(*self.labels)

    def on_token(self, times: RequestTimes, now: float) -> None:
        """Record a token that arrived from the engine."""
        if times.tokens:
            self.next_token.observe(now - times.last)
        else:
            times.first = now
            self.first_token.observe(now - times.submitted)
            self.prompt_tokens.inc(times.prompt)
        times.last = now
        times.tokens += 1
        self.generation_tokens.inc()

    def on_end(self, times: RequestTimes, reason: str, queued: Optional[float] = None) -> None:
        """Record the end of a request; `reason` is length, stop, abort or error."""
        self.ends.labels(*self.labels, reason).inc()
        if queued is not None:
            self.queue_time.observe(queued)
        if reason in ("abort", "error"):
            return
        self.latency.observe(times.last - times.submitted)
        self.request_prompt.observe(times.prompt)
        self.request_output.observe(times.tokens)
        if times.tokens > 1:
            self.mean_next_token.observe((times.last - times.first) / (times.tokens - 1))

    def text(self, state: Mapping[str, int]) -> bytes:
        """Return all metrics; `state` is the last state of the engine."""
        self.running.set(state["running"])
        self.waiting.set(state["waiting"])
        self.swapped.set(state["swapped"])
        self.cache_usage.set(1 - state["free_blocks"] / state["total_blocks"])
        for key, counter in self._totals.items():
            counter.inc(state[key] - self._counted[key])
            self._counted[key] = state[key]
        lines = prometheus.generate_latest(self.registry).splitlines(keepends=True)
        for name, old in OLD_NAMES.items():
            lines += [line.replace(name, old) for line in lines if name in line]
        return b"".join(lines)
