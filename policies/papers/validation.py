"""Recordings per version of the schedulers of papers, and what is not modelled."""

from servesim.config.families import Validation

VALIDATION = {
    "Sarathi-Serve": Validation(
        {"sarathi": {"96f9911": 2}, "sarathi-alternating": {"96f9911": 0}, "static": {"96f9911": 2}},
        "pipeline parallelism",
    ),
    "LightLLM": Validation({"lightllm": {"4b037f68": 5}}, "prompt cache, versions after April 2024"),
    "others": Validation(
        {
            "splitfuse": {"8abdd98": 3},
            "orca": {"OSDI 2022": 0},
        },
        "pipeline parallelism",
    ),
}
