"""`sim recommend`: from a model, a device, a load and limits to the settings of a server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from servesim.core import BadInput

from . import options

ENGINES = ("vllm", "sglang", "mindie", "vllm-ascend")
EXPORTED = {"vllm-ascend": "vllm"}  # engine -> server of `sim export`


def register(commands: Any) -> None:
    recommend = commands.add_parser(
        "recommend", help="find the settings of a server for a model, a device, a load and limits",
        description="Try the settings that matter for an engine at your load, and print the best ones as a command of "
        "the server, the highest load within your limits, and what limits it. Requests arrive at random; their lengths "
        "have the given means, and half of the mean as standard deviation. --trace FILE uses your own requests.",
    )  # fmt: skip
    server = recommend.add_argument_group("server")
    options.add(server, {"--engine NAME": "the engine"}, choices=ENGINES, default="vllm")
    options.add(server, {
        "--model NAME": "public model (`sim models`), or its config.json or folder",
        "--device NAME": "device, such as H100 (`sim models`)",
        "--precision NAME": "precision of the weights, such as bf16 or fp8 (default: bf16)",
        "--profile NAME": "measured profile, instead of model and device: bundled name or folder",
    })  # fmt: skip
    options.add(server, {"--tensor-parallel N": "devices that share the model (default 1)"}, type=int)
    load = recommend.add_argument_group("load")
    options.add(load, {"--rate RATE": "requests per second"}, type=float)
    options.add(load, {
        "--prompt TOKENS": "mean length of prompts, with the system prompt",
        "--output TOKENS": "mean length of answers",
        "--system-prompt TOKENS": "tokens at the beginning that all prompts share (default 0)",
    }, type=int)  # fmt: skip
    options.add(load, {"--trace FILE": "requests, instead of the options above; --rate scales their arrival times"})
    options.add(load, {"--subject-to BOUND": "limit such as 'p99_ttft_ms <= 1000' (repeatable)"}, action="append",
                default=[], type=options.bound)  # fmt: skip
    out = recommend.add_argument_group("output")
    options.add(
        out,
        {"-o, --folder DIR": "folder of the scenario, both sweeps and their reports (default: runs/recommend-ENGINE)"},
    )
    options.add(out, {"-j, --jobs N": "worker processes (default: one per core)"}, type=int)
    recommend.set_defaults(run=print_answer)


def print_answer(args: argparse.Namespace) -> int:
    """Run the sweeps and print the answer; return 1 if no setting meets the limits."""
    from servesim.config.export import export_scenario
    from servesim.study.executor import open_executor
    from servesim.study.progress import Progress
    from servesim.study.recommend import Question, answer_text, recommend

    question = Question(args.engine, {**profile_key(args), **load_key(args)}, args.subject_to)
    folder = Path(args.folder or f"runs/recommend-{args.engine}")
    with open_executor("local", args.jobs) as executor, Progress("recommend", args.quiet) as progress:
        answer = recommend(question, folder, executor, progress)
    server = EXPORTED.get(args.engine, args.engine)
    exported = export_scenario(answer.scenario, server, args.model or "MODEL")
    print(answer_text(answer, exported.text, next_command(args)))
    print(f"Files: {folder}: scenario.yaml; sweep.yaml and capacity.yaml, which `sim sweep` repeats")
    return 0 if answer.best.eligible else 1


def profile_key(args: argparse.Namespace) -> dict[str, Any]:
    """Return the profile: a measured one, or names."""
    names = ("model", "device", "precision", "tensor_parallel")
    keys = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.profile:
        if set(keys) - {"model"}:
            raise BadInput("--profile: expected a measured profile, or --model and --device, got both")
        return {"profile": args.profile}
    if "model" not in keys or "device" not in keys:
        raise BadInput("expected --model and --device, or --profile; `sim models` lists names")
    return {"profile": keys}


def load_key(args: argparse.Namespace) -> dict[str, Any]:
    """Return the requests: a trace, or a workload of the given means."""
    from servesim.study.recommend import workload

    if args.trace:
        return {"trace": {"path": args.trace, **({} if args.rate is None else {"rate": args.rate})}}
    missing = [name for name in ("rate", "prompt", "output") if getattr(args, name) is None]
    if missing:
        raise BadInput(f"expected --{missing[0]}, or --trace FILE")
    return {"workload": workload(args.rate, args.prompt, args.output, args.system_prompt or 0)}


def next_command(args: argparse.Namespace) -> str:
    """Return what to do next: replace derived step times by measured ones."""
    if args.profile:
        return "sim replay scenario.yaml --url http://HOST:PORT measures these settings on the server"
    if args.engine == "vllm":
        return f"sim calibrate vllm -o my-server -- {args.model} replaces derived step times by measured ones"
    return "sim calibrate endpoint --url http://HOST:PORT -o my-server replaces derived step times by measured ones"
