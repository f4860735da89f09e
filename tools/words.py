"""Find words and names that the house vocabulary replaced: python tools/words.py [FOLDER or FILE ...]

It prints each hit as file:line and the number of hits. The exit code is 1 if there are any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".md", ".ipynb", ".yaml", ".html", ".sh", ".cfg", ".toml")
EXEMPT = ("tests/recordings/", "tools/words.py", "tests/test_words.py")
MAY_NAME_OLD_IDENTIFIERS = ("CHANGELOG.md",)

# Metaphors: forbidden as a word, and as a part of a CamelCase or snake_case name.
METAPHORS = ("desk", "doorman", "guest", "workout", "tale", "stage", "turnstile", "story", "sitting")
PLURALS = {"doormen": "doorman", "stories": "story", **{f"{word}s": word for word in METAPHORS}}
OLD_IDENTIFIERS = ("outlive_nobody", "_let_go")
FOREIGN_IDENTIFIERS = (  # options of Sarathi-Serve, Triton and MindIE
    "chunk_schedule_stages", "num_stages", "stage_policy", "STAGE_POLICIES", "stageSelectPolicy",
)  # fmt: skip
STAGE_FILES = (  # about Sarathi-Serve's chunk schedule, Triton's pipelines and load tests, which have stages
    "policies/papers/sarathi.py", "docs/policies.md", "calibrate/device/torch/fused_operators.py",
    "benchmarks/gpu_tune.py",
    "traces/make/", "tests/traces/make/", "tests/config/test_numbers.py", "docs/traces.md", "docs/structure.md",
    "docs/imports.md", "docs/calibrate.md", "calibrate/logs/", "tests/calibrate/logs/test_reported.py",
    "benchmarks/fuzz_targets.py", "benchmarks/proof_derive.py", "benchmarks/proof_blis.py", "tests/test_proof.py",
)  # fmt: skip
WORDS = ("whoever", "somebody", "nobody", "everybody", "so many", "is told", "anew", "aloud")

PICTURE = re.compile(r'(?<="image/png": ")[^"]*')  # of a notebook: letters that mean nothing
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# The two words of a phrase may be on two lines of a comment, a docstring or a page.
PHRASE = re.compile(
    r"(?<![a-z])(" + "|".join(word.replace(" ", r"[\s_#>]+") for word in WORDS) + r")s?(?![a-z])", re.IGNORECASE
)
STANDARD_COUNTER = re.compile(
    r"^ *(from collections import .*\bCounter\b|import collections\b|from torch.utils.flop_counter import"
    r"|import prometheus_client\b)",
    re.MULTILINE,
)


class Hit(NamedTuple):
    """One forbidden word."""

    file: str
    line: int
    word: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word}"


def text_files(root: Path = ROOT) -> list[Path]:
    """Return the text files of the repository: those that git tracks, or all without a git folder."""
    if (root / ".git").exists():
        listing = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
        paths = [root / name for name in listing.splitlines()]
    else:
        paths = [path for path in root.rglob("*") if not _is_generated(path.relative_to(root))]
    return sorted(path for path in paths if path.is_file() and (path.suffix in SUFFIXES or path.name == "Makefile"))


def _is_generated(path: Path) -> bool:
    return any(part.startswith(".") or part in ("build", "dist", "demo-out") for part in path.parts)


def find_hits(paths: Iterable[Path], root: Path = ROOT) -> list[Hit]:
    """Return every hit in these files, in order of file and line."""
    hits = []
    for path in paths:
        name = path.resolve().relative_to(root).as_posix()
        if not name.startswith(EXEMPT):
            text = PICTURE.sub("", path.read_text(encoding="utf-8"))
            hits += [Hit(name, text.count("\n", 0, start) + 1, word) for start, word in sorted(scan(text, name))]
    return hits


def scan(text: str, name: str = "") -> Iterator[tuple[int, str]]:
    """Yield position and text of every forbidden word."""
    for match in PHRASE.finditer(text):
        yield match.start(), " ".join(match.group().split())
    if name in MAY_NAME_OLD_IDENTIFIERS:
        return
    metaphors = [word for word in METAPHORS if word != "stage" or not name.startswith(STAGE_FILES)]
    allows_counter = STANDARD_COUNTER.search(text) is not None
    for match in IDENTIFIER.finditer(text):
        identifier = match.group()
        if identifier in FOREIGN_IDENTIFIERS:
            continue
        parts = PART.findall(identifier)
        # "counter" is a common word; only a class of this name is forbidden.
        own_counter = not allows_counter and any(part in ("Counter", "Counters") for part in parts)
        metaphor = any(PLURALS.get(part.lower(), part.lower()) in metaphors for part in parts)
        if own_counter or metaphor or identifier in OLD_IDENTIFIERS:
            yield match.start(), identifier


def main(arguments: list[str]) -> int:
    """Print the hits in these files and folders, by default in the whole repository."""
    chosen = [Path(argument).resolve() for argument in arguments] or [ROOT]
    files = [path for path in text_files() if any(path == top or top in path.parents for top in chosen)]
    hits = find_hits(files)
    for hit in hits:
        print(hit)
    print(f"{len(hits)} forbidden words in {len(files)} files")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
