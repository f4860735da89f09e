"""`sim calibrate endpoint`: measure the step costs of a black-box server over HTTP."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from servesim.core import BadInput

from .notes import print_note
from .options import MODEL_HELP, add, add_server_options, numbers

ASYNCHRONOUS = (
    "with asynchronous scheduling, the default of vLLM, token times do not show when a step starts: prefills look too "
    "short; `sim calibrate vllm` records the steps, or start the server with --no-async-scheduling"
)


def register_endpoint(kinds: Any) -> None:
    endpoint = kinds.add_parser(
        "endpoint", run=calibrate_endpoint, help="send calibration loads to a running server and fit its step costs",
        description="Calibrate a server over HTTP. The loads are single requests of growing length, steady batches, "
        "bursts of prompts, and prompts sent to a busy server. answers.jsonl keeps every response. samples.csv "
        "keeps every step time computed from the responses. If a load fails, the other loads still run.",
    )  # fmt: skip
    server = add_server_options(endpoint, required=True, timeout=120.0)
    add(server, {"--device TEXT": "name of the device, written to the profile", "--model MODEL": MODEL_HELP})
    loads = endpoint.add_argument_group("loads")
    lengths = "prompt tokens of the single requests (default: 16,32,... to 2048, or to the max_model_len of the server)"
    add(loads, {
        "--lengths N,N...": lengths,
        "--batches N,N...": "requests per steady batch (default: 2,4,8,16,32)",
        "--bursts N,N...": "prompts per burst (default: 2,4,8)",
    }, type=numbers)  # fmt: skip
    add(loads, {"--output-tokens N": "output tokens per request (default 32)"})
    add(loads, {"--rounds N": "repetitions of each load (default 3)"})
    add(loads, {"--max-tokens N": "maximum cached tokens per batch (default 8192)"})
    add(loads, {"--budget S": "start no new load after this many seconds (default 600)"})
    out = endpoint.add_argument_group("output")
    add(out, {"-o, --output DIR": "profile folder to write"}, required=True)
    add(out, {"--resume": "continue with the responses in DIR; failed loads are repeated"})


def calibrate_endpoint(args: argparse.Namespace) -> int:
    """Calibrate a server; return 1 if the server or the fit failed, 130 if interrupted."""
    from servesim.files.lock import only_writer

    with only_writer(Path(args.output)):
        return measure_and_fit(args)


def measure_and_fit(args: argparse.Namespace) -> int:
    """Measure, fit, print and write; return the exit code."""
    from servesim.calibrate.client.prompts import new_seed
    from servesim.calibrate.client.server_counters import vllm_version
    from servesim.calibrate.endpoint.fit import (
        NotEnoughData,
        describe_server,
        fit_steps,
        front_end_line,
        load_lines,
        profile_about,
        write_step_samples,
    )
    from servesim.calibrate.endpoint.measure import detect_api, measure_endpoint
    from servesim.calibrate.endpoint.steps import observed_steps
    from servesim.calibrate.probe.check import report
    from servesim.costs.device_profile import load_profile, write_profile
    from servesim.costs.model_config import read_model

    design, folder, model = design_of(args), Path(args.output), read_model(args.model)
    caller = detect_api(args.url, args.api, args.served_model, args.timeout, new_seed())
    if vllm_version(args.url):
        print_note(args, ASYNCHRONOUS)
    design = design.within(caller.max_length, args.lengths is not None)
    measured = measure_endpoint(caller, design, folder, args.budget, args.resume, args.quiet)
    if measured.end_reason == "interrupted":
        print(f"sim: interrupted; --resume -o {folder} continues", file=sys.stderr)
    labels = {"name": folder.resolve().name, "device": args.device, "model": model}
    try:
        fit = fit_steps(observed_steps(measured.good), describe_server(caller, labels))
        write_step_samples(folder / "samples.csv", fit)
        write_profile(folder, profile_about(fit, measured), fit.profile.cost)
    except (NotEnoughData, BadInput) as reason:  # the measurement can have taken hours: say what it has, and where
        print("\n".join([*load_lines(measured), "verdict: no profile was written"]))
        print(f"sim: {reason}; responses: {folder / 'answers.jsonl'}", file=sys.stderr)
        return 130 if measured.end_reason == "interrupted" else 1
    print("\n".join([*load_lines(measured), front_end_line(fit), "", report(load_profile(folder))]))
    print(f"profile: {folder / 'profile.yaml'}")
    if measured.end_reason == "interrupted":
        return 130
    return 1 if measured.end_reason is not None and "no longer answers" in measured.end_reason else 0


def design_of(args: argparse.Namespace) -> Any:
    """Return the loads that the options describe."""
    from servesim.calibrate.endpoint.load_plan import Design

    for name in ("budget", "timeout"):
        if not 0 < getattr(args, name) < float("inf"):
            raise BadInput(f"--{name}: expected a positive number of seconds, got {getattr(args, name):g}")
    return Design(
        args.lengths or Design.lengths,
        args.batches or Design.batches,
        args.bursts or Design.bursts,
        args.output_tokens,
        args.rounds,
        args.max_tokens,
    )
