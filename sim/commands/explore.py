"""`sim explore`: a local page with the settings of a scenario as controls and its result as charts."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from servesim.core import BadInput

from . import options


def register(commands: Any) -> None:
    explore = commands.add_parser(
        "explore", run=explore_scenario, help="try settings on a local page: sliders on the left, results on the right",
        description="Show a scenario on a local page. The settings are controls, and the results follow while a slider "
        "moves. Only this machine reaches the page, with the address that the command prints.",
    )  # fmt: skip
    source = "scenario YAML file, or an llm-serving configuration (default: a vLLM server on an H200)"
    options.add(explore, {
        "[FILE]=scenario": source,
        "--preset NAME": "preset to start from, with the requests of FILE",
        "--set KEY=VALUE": "first value of a control, e.g. policy.max_num_seqs=64 (repeatable)",
    })  # fmt: skip
    options.add_trust(explore)
    options.add_names(explore)
    server = explore.add_argument_group("server")
    options.add(server, {"--port N": "port of 127.0.0.1 (default: a free one)"}, default=0)
    options.add(server, {"--no-browser": "print the address, open no browser", **options.JOBS})


def explore_scenario(args: argparse.Namespace) -> int:
    """Serve the page until interrupted."""
    from servesim.config.layers import setting_layers
    from servesim.explorer.server import open_page

    if not 0 <= args.port < 65536:
        raise BadInput(f"--port: expected 0 to 65535, got {args.port}")
    setting_layers(args.set)  # reports a setting without =
    settings = dict(setting.partition("=")[::2] for setting in options.settings_of(args))
    server = open_page(args.scenario, args.preset, settings, args.port, args.jobs)

    def ready() -> None:
        print(f"explore at {server.url}\nCtrl-C stops it.", flush=True)
        # A window must be able to open: a browser of the terminal would take the terminal away.
        has_window = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if not args.no_browser and (has_window or sys.platform in ("darwin", "win32")):
            import webbrowser

            webbrowser.open(server.url)

    server.run(ready)
    return 0
