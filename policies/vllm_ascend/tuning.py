"""What `sim recommend` tries on vllm-ascend."""

from servesim.config.families import Tuning
from servesim.policies.vllm_v1.tuning import PARAMS

TUNINGS = {"vllm-ascend": Tuning("vllm-ascend-0.11", PARAMS)}
