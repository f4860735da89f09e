"""What several commands print: JSON, and besides their results notes, warnings, paths, and how to continue."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servesim.core.errors import DeviceFailed, WorkerLost

if TYPE_CHECKING:
    from servesim.config.exported import Exported


def print_json(value: Any, **how: Any) -> None:
    """Print a result as JSON; `how` is what `json.dumps` needs."""
    import json

    print(json.dumps(value, indent=1, **how))


def print_result(args: argparse.Namespace, value: Callable[[], Any], text: Callable[[], str], **how: Any) -> None:
    """Print a result: with --json the value, else the text."""
    if args.json:
        print_json(value(), **how)
    else:
        print(text())


def print_note(args: argparse.Namespace, *texts: str) -> None:
    """Print notes for the user on standard error, unless --quiet."""
    for text in () if args.quiet else texts:
        print(f"sim: {text}", file=sys.stderr, flush=True)


def print_warning(*texts: str) -> None:
    """Print warnings on standard error, also with --quiet: the result may be wrong for the user's server."""
    for text in texts:
        print(f"sim: warning: {text}", file=sys.stderr, flush=True)


def print_warnings_of(tree: Mapping[str, Any]) -> None:
    """Print the warnings of a scenario that has run."""
    from servesim.runs.run_warnings import scenario_warnings

    print_warning(*(warning.text for warning in scenario_warnings(dict(tree))))


def print_messages(exported: Exported) -> None:
    """Print on standard error what an exported file has no comments for."""
    for line in [] if exported.has_comments else exported.messages:
        print(f"sim: {line}", file=sys.stderr)


def print_path(args: argparse.Namespace, text: str) -> None:
    """Print where a file is; with --json it is a note, because standard output has one JSON document."""
    if args.json:
        print_note(args, text)
    else:
        print(text)


def print_profile(folder: Path) -> None:
    """Print the verdict on a profile that was written, and its path."""
    from servesim.costs.device_profile import load_profile
    from servesim.costs.profile_verdict import verdict_on

    print("\n".join([*verdict_on(load_profile(folder)).lines(), f"profile: {folder / 'profile.yaml'}"]))


def note_uncertainty(args: argparse.Namespace, profiles: Iterable[Any]) -> None:
    """Print a note for each of these profiles that stores no uncertainty of its fit."""
    from servesim.costs.device_profile import load_profile
    from servesim.runs.notes import note

    for profile in {str(profile): profile for profile in profiles}.values():
        loaded = load_profile(profile)
        if not loaded.uncertainty.draws:
            print_note(args, note("no uncertainty", profile=loaded.name).text)


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Add to the message how a command continues after the device, its workers, the disk or the user have ended it."""
    hint = f"--resume -o {folder} continues"
    try:
        yield
    except BrokenPipeError:
        raise
    except (DeviceFailed, WorkerLost, OSError) as failed:
        text = str(failed)  # that of a full disk has its own hint
        raise WorkerLost(text if "--resume" in text else f"{text}; {hint}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(hint) from None
