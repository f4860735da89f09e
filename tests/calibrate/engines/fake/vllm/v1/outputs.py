"""Results of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class ModelRunnerOutput:
    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    logprobs: Any
    prompt_logprobs_dict: dict[str, Any]
    pooler_output: list[Any]


@dataclass
class DraftTokenIds:
    req_ids: list[str]
    draft_token_ids: list[list[int]]


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput([], {}, [], None, {}, [])
