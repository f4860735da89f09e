"""Print what commands print: the help of policies and presets, and errors of users' policies and settings.

    python -m tests.compiled.print_texts

Tests run this in compiled and in plain Python and compare the lines.
"""

from __future__ import annotations

import contextlib
import io

from servesim.cli import main
from servesim.config.registry import presets
from servesim.engine import loop
from servesim.policies import POLICIES

USER = "tests/compiled/user_policies.py"
CLASSES = (
    "FillBatch", "NewDefaults", "NewDefaultsByField", "Slots", "OwnInit", "NumpyCounts", "NumberForBool", "OwnState",
    "PlainClass", "ShortestFirst", "WrappedVLLM", "VLLMDefaults", "SmallChunksVLLM",
)  # fmt: skip
BAD_CLASSES = (
    "FloatHold", "DividesByZero", "EndlessRecursion", "StopsIteration", "RaisesFrom", "NoPlan", "NoSortKey",
    "TooManyTokens",
)  # fmt: skip
SETTINGS = ("policy.max_num_seqs=1e3", "policy.max_wait=3", "policy.aging=1")
BAD_SETTINGS = (
    "policy.order=fastest", "policy.max_num_seqs=0", "policy.max_num_seqs=2.5", "policy.max_num_seqs=many",
    "policy.max_wait=-1", "policy.watermark=1", "policy.policy=lifo", "policy.enable_chunked_prefill=maybe",
    "policy.max_num_seq=3",
)  # fmt: skip
RUN = ("run", "--json", "-X", "3", "-T", "4")


def commands() -> list[tuple[str, ...]]:
    """Return the commands to run."""
    users = [f"{USER}:{name}" for name in (*CLASSES, *BAD_CLASSES)]
    return [
        ("policies", "list"),
        *(("policies", "show", name) for name in (*POLICIES, *presets(), *users)),
        *((*RUN, "--policy", name) for name in users),
        *((*RUN, "--policy", "vllm-v1", "--set", setting) for setting in (*SETTINGS, *BAD_SETTINGS)),
    ]


def show(command: tuple[str, ...]) -> None:
    """Run a command in this process; print it, its exit code and all that it prints."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            code = main(command)
    except SystemExit as stop:
        code = int(stop.code or 0)
    print(f"$ sim {' '.join(command)} -> {code}")
    print(text.getvalue(), end="")


if __name__ == "__main__":
    print(loop.__file__)
    for each in commands():
        show(each)
