"""`sim calibrate endpoint`: step costs of a server that one cannot look into."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from servesim.core import BadInput


def register_endpoint(kinds: Any) -> None:
    endpoint = kinds.add_parser(
        "endpoint",
        help="drive a running server with designed loads and fit its step costs",
        description="Calibrate a server over HTTP: single requests of growing length, steady batches, bursts of "
        "prompts, prompts into a busy server. Every answer is kept in answers.csv, every step that can be seen in them "
        "in samples.csv; loads that fail are recorded and the others go on.",
    )
    server = endpoint.add_argument_group("server")
    server.add_argument("--url", required=True, metavar="URL", help="where it listens, http://HOST:PORT")
    server.add_argument("--api", choices=("llm-serving", "openai"), required=True, help="what it speaks")
    server.add_argument("--served-model", metavar="NAME", help="the model's name there (the first it lists)")
    server.add_argument("--device", metavar="TEXT", help="what it runs on, for the profile")
    server.add_argument("--model", metavar="TEXT", help="what it serves, for the profile")
    loads = endpoint.add_argument_group("loads")
    loads.add_argument("--lengths", metavar="N,N...", help="prompts of single requests (16,32,... to 2048)")
    loads.add_argument("--batches", metavar="N,N...", help="rows of steady batches (2,4,8,16,32)")
    loads.add_argument("--bursts", metavar="N,N...", help="prompts at once (2,4,8)")
    loads.add_argument("--output-tokens", type=int, default=32, metavar="N", help="an answer has (32)")
    loads.add_argument("--rounds", type=int, default=3, metavar="N", help="times that each load is given (3)")
    loads.add_argument("--most-tokens", type=int, default=8192, metavar="N", help="of a batch, in the cache (8192)")
    loads.add_argument("--burst-tokens", type=int, default=2048, metavar="N", help="of a burst's prompts (2048)")
    loads.add_argument("--budget", type=float, default=600.0, metavar="S", help="begin no load after (600)")
    loads.add_argument("--timeout", type=float, default=120.0, metavar="S", help="give up a request after (120)")
    loads.add_argument("--salt", metavar="TEXT", help="what prompts are drawn from (the time: none was seen before)")
    out = endpoint.add_argument_group("output")
    out.add_argument("-o", "--output", required=True, metavar="DIR", help="profile folder to write")
    out.add_argument("--resume", action="store_true", help="go on with DIR's answers, failed loads once more")
    out.add_argument("-q", "--quiet", action="store_true", help="no progress")
    endpoint.set_defaults(run=calibrate_endpoint)


def calibrate_endpoint(args: argparse.Namespace) -> int:
    """Measure, fit, tell, write; 1 when the server did not last or nothing could be fitted, 130 when interrupted."""
    from servesim.calibrate.endpoint.fit import TooLittle, fit_steps
    from servesim.calibrate.endpoint.measure import calibrate, contact
    from servesim.calibrate.endpoint.steps import steps
    from servesim.calibrate.endpoint.text import about, table, troubles, write_samples
    from servesim.costs.device_profile import write_profile

    design, folder = design_of(args), Path(args.output)
    salt = args.salt or str(time.time_ns())
    caller = contact(args.url, args.api, args.served_model, args.timeout, salt)
    measured = calibrate(caller, design, folder, args.budget, salt, args.resume, args.quiet)
    if measured.ended == "interrupted":
        print(f"sim: interrupted; --resume -o {folder} continues", file=sys.stderr)
    try:
        fit = fit_steps(*steps(measured.good))
    except TooLittle as little:
        print("\n".join(troubles(measured)))
        print(f"sim: {little}; answers: {folder / 'answers.csv'}", file=sys.stderr)
        return 130 if measured.ended == "interrupted" else 1
    given = {"name": folder.resolve().name, "device": args.device, "model": args.model}
    write_profile(folder, about(fit, measured, caller, given), fit.solved.cost)
    write_samples(folder / "samples.csv", fit)
    print(table(fit, measured))
    print(f"profile: {folder / 'profile.yaml'}")
    if measured.ended == "interrupted":
        return 130
    return 1 if measured.ended is not None and "no longer answers" in measured.ended else 0


def design_of(args: argparse.Namespace) -> Any:
    """Return the loads that the options ask for."""
    from servesim.calibrate.endpoint.load_plan import Design, numbers

    for name in ("budget", "timeout"):
        if not 0 < getattr(args, name) < float("inf"):
            raise BadInput(f"--{name}: expected a positive number of seconds, got {getattr(args, name):g}")
    return Design(
        numbers(args.lengths, "--lengths", Design.lengths),
        numbers(args.batches, "--batches", Design.batches),
        numbers(args.bursts, "--bursts", Design.bursts),
        args.output_tokens,
        args.rounds,
        args.most_tokens,
        args.burst_tokens,
    )
