"""The timeline of a measured run, from its model calls, requests and device counters; see timeline.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from servesim.core import Request
from servesim.engine.step import ModelCall

from .device_counters import MEMORY, MEMORY_BUSY, POWER, TIME, UTILISATION, Rows
from .timeline import DEVICE, ENGINE, TraceFile, microseconds

TRACKS = {  # name of the counter track -> names of its values, and their columns
    "utilisation (%)": {"device": UTILISATION, "memory": MEMORY_BUSY},
    "memory (MB)": {"used": MEMORY},
    "power (W)": {"power": POWER},
}


def write_measured_timeline(calls: Sequence[ModelCall], requests: Sequence[Request], rows: Rows, path: Path) -> None:
    """Write the timeline of a finished run."""
    with TraceFile(path) as trace:
        if rows:
            trace.name_group(DEVICE, "device")
        for call in calls:
            shape = call.shape
            facts = {"prompts": shape.prefill_rows, "prompt_tokens": shape.prefill_live, "decodes": shape.decode_live,
                     "context": shape.context, "host_us": microseconds(call.called - call.start)}  # fmt: skip
            duration = microseconds(call.end) - microseconds(call.start)
            trace.event("X", call.start, ENGINE, shape.kind, tid=1, dur=duration, args=facts)
        for request in requests:
            write_request(trace, request)
        for row in rows:
            for track, columns in TRACKS.items():
                values = {name: row[column] for name, column in columns.items() if row[column] is not None}
                if values:
                    trace.event("C", row[TIME] or 0.0, DEVICE, track, args=values)


def write_request(trace: TraceFile, request: Request) -> None:
    """Write a request with its time before and after the first token."""
    end = request.sent if request.client_end is None else request.client_end
    name = f"request {request.id}"
    trace.slice("b", request, name, request.sent, {"prompt": request.prompt, "limit": request.limit})
    if request.first_token is not None:
        for part, start, stop in (
            ("first token", request.sent, request.first_token),
            ("decode", request.first_token, end),
        ):
            trace.slice("b", request, part, start)
            trace.slice("e", request, part, stop)
    facts = {"outcome": request.outcome or "unfinished", "written": request.written}
    trace.slice("e", request, name, end, facts)
