"""Notes on a result: what makes it differ from the real server, without an error.

A note is a key and values. `PHRASES` is the only place of its text, for the terminal, for pages and for JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

LABEL_MEANINGS = {  # labels of configurations
    "stuck": "the engine can never run again (deadlock or livelock); cannot win",
    "serves fewer": "leaves more requests unserved than the baseline; cannot win",
    "does not start": "the real engine refuses these settings at its start; cannot win",
    "saturated": "the backlog grows until the last arrival; latencies depend on the length of the run",
    "outside profile": "some steps are larger than the measured range of the profile",
}
PHRASES = {
    **{label: f"{label}: {meaning}" for label, meaning in LABEL_MEANINGS.items()},
    "refused": "the {engine} does not start: {reasons}",
    "default blocks": "engine.num_blocks keeps its default of {blocks:,} ({size} of KV cache), but {device} has memory "
    "for about {possible:,}: set engine.num_blocks, or engine.device_memory: {memory}MiB",
    "server config": "{file}: {text}",  # in the words of its engine (policies/*/config_file.py)
    "bad profile": "profile {profile}: {verdict}; see sim calibrate check {path}",
    "derived profile": "profile {profile} was {how}; it was not measured",
    "own backend": "profile {profile} was measured on servesim's own torch backend: the step times of vLLM and of "
    "other engines differ",
    "no uncertainty": "profile {profile} has no stored uncertainty: the intervals include only the spread between "
    "sessions",
    "no drafting time": "profile {profile} has no drafting time: drafting counts as 0 s, so the real server is slower; "
    "set speculative.drafting (seconds per step)",
    "unused prefixes": "prompts of the trace share prefixes, but the run has no prefix cache: an unlimited one would "
    "hit {hits:.1f} % of the {blocks:,} prompt blocks",
    "several answers": "{engine}: several answers to a request (n > 1) are not reproduced; each runs as a request "
    "of its own",
    "lengths only": "the prefix cache is on, but the trace has only the lengths of its prompts: none shares a prefix "
    "with another one. If the prompts of the server do, its TTFT is lower",
    "outside range": "outside the measured range of the profile: {sizes}",
    "stuck run": "the engine gets {reason}",  # of Stuck
    "other setting": "{setting}: the server has {server}, but {simulated} is simulated",
    "other version": "the server runs vLLM {version}, but the rules of {simulated} are simulated: set policy.version, "
    "or compare the decisions with `sim policies prove vllm-v1 --engine vllm`",
}


class Note(NamedTuple):
    """A note, as data."""

    key: str
    values: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The note as one line."""
        return PHRASES[self.key].format(**self.values)


def sentence(text: str) -> str:
    """Return a line as a sentence of a page."""
    return f"{text[:1].upper()}{text[1:]}."


def note(key: str, **values: Any) -> Note:
    """Return a note."""
    return Note(key, values)
