"""Recordings per version of llm-serving, and what is not modelled."""

from servesim.config.families import Validation

VALIDATION = {
    "llm-serving": Validation({"llm-serving": {"7342f33": 74}}, "versions after May 2024", modified=("moon", "yyds")),
}
