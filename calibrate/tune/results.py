"""The files that a tuning run leaves for its user: rounds.csv, profile/, best.yaml, summary.csv."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from servesim.config.overrides import merge
from servesim.files.write import replacing
from servesim.study.files import write_summary
from servesim.study.ranking import Summary

from .loop import TuneResult
from .rounds import write_rounds

PROFILE_FILES = ("samples.csv", "profile.yaml")


def write_results(result: TuneResult, folder: Path) -> Summary:
    """Write the files; return the last sweep, with the copied profile."""
    write_rounds(folder / "rounds.csv", result.rounds)
    summary = result.summary
    source = Path(str(summary.experiment.base.get("profile")))
    if len(result.rounds) > 1:
        copy_profile(source, folder / "profile")
        summary.experiment = replace(
            summary.experiment, base=merge(summary.experiment.base, {"profile": str(folder / "profile")})
        )
    write_summary(summary, folder)
    return summary


def copy_profile(source: Path, target: Path) -> None:
    """Copy the files of a profile folder."""
    for name in PROFILE_FILES:
        if (source / name).exists():
            with replacing(target / name) as part:
                shutil.copyfile(source / name, part)
        else:
            (target / name).unlink(missing_ok=True)
