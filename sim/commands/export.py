"""`sim export`: print a scenario as the command or the configuration of a real server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import options
from .notes import print_messages


def register(commands: Any) -> None:
    export = commands.add_parser(
        "export", run=run_export, help="print a scenario as flags or configuration of a real server",
        description="Print the command or the configuration with which a real server runs the policy of a scenario. "
        "Comments list what it cannot express.",
    )  # fmt: skip
    options.add(export, {"FILE=scenario": "scenario file, or the folder of a run or of a sweep"})
    options.add(export, {f"--to {{{','.join(options.SERVERS)}}}": "the server"}, required=True)
    options.add(export, {"--model NAME": "model that the server loads (default: that of the profile, if it names one)"})
    options.add(export, {**options.SETTING, "-o, --output FILE": "file to write (default: standard output)"})


def read_source(source: str, settings: list[str]) -> dict[str, Any]:
    """Return the scenario of a file, of a run folder, or of the winner in the folder of a sweep, with settings."""
    from servesim.config.layers import assemble, read_scenario_file, setting_layers
    from servesim.core import BadInput
    from servesim.runs.run_folder import MANIFEST, read_manifest

    folder = Path(source)
    if not folder.is_dir():
        return read_scenario_file(source, settings)
    if (folder / "best.yaml").exists():
        return read_scenario_file(folder / "best.yaml", settings)
    if (folder / MANIFEST).exists():
        return assemble(setting_layers(settings), read_manifest(folder))
    raise BadInput(
        f"{source}: expected a scenario file, or a folder of `sim run -o` ({MANIFEST}) or of a sweep (best.yaml)"
    )


def run_export(args: argparse.Namespace) -> int:
    """Print the settings, or write them to a file."""
    from servesim.config.export import export_scenario
    from servesim.config.scenario import scenario_from
    from servesim.core import BadInput
    from servesim.files.write import write_text

    scenario = scenario_from(read_source(args.scenario, args.set), args.scenario)
    try:
        exported = export_scenario(scenario, args.to, args.model)
    except BadInput as bad:
        raise BadInput(f"{args.scenario}: {bad}") from None
    text = exported.render(args.scenario)
    print_messages(exported)
    if args.output in (None, "-"):
        print(text, end="")
        return 0
    write_text(args.output, text)
    print(f"wrote {args.output}; settings that are not expressed: {len(exported.not_expressed)}")
    return 0
