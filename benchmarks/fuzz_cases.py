"""Cases of fuzz.py: a valid input with mutated files, a mutated command line, or an edited user policy."""

from __future__ import annotations

import argparse
import os
import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fuzz_mutations import mutate
from fuzz_seeds import Command, Files, write_files
from fuzz_targets import Input

DAMAGES = ("missing", "folder", "unreadable", "fifo", "endless", "dangling link")
RESULTS = ("summary.csv", "pareto.csv", "best.yaml")
NUMBERS = (
    "0", "-1", "1", "2", "0.5", "1e308", "-1e308", "1e400", "nan", "inf", "9" * 5000, "1e13", "", "x", "5%", "\u0663",
)  # fmt: skip
NAMES = (
    "", " ", "x", "no-such.yaml", ".", "..", "f.yaml", "f.yaml/x", "/dev/null", "a\0b", "x" * 5000, "e", "e:0",
    "e:9", "e:-1",
    "a\nb", "\udcff", "=", "a=b", "policy.decode_batch=2", "policy.decode_batch=[1", "engine.num_blocks=1e400",
    "a.b.c.d=1",
    "policy=1", "engine=null", "workload.requests=3", "seed=-1", "profile=no", "slo.ttft=.nan", "ttft:1",
    "ttft:nan", "ttft",
    "arrival=x", "prompt=arrival_s", "vllm", "orca", "makespan", "makespan<=1", "mean_ttft_ms>=nan", "0:1", "1:0",
    "nan:",
    "1/2", "0/0", "2/1", "azure", "mooncake", "local", "../../x", "&a *a", "!!python/name:os.getcwd", "{" * 50,
)  # fmt: skip
OUTPUTS = ("", "out/" + "x" * 300, "out/a\0b", "f.yaml/x", "out", "out/x.gz", "out/\udcff")
# These start processes or servers, or wait for a network.
SKIPPED = {
    "--executor",
    "--worker-python",
    "--backend",
    "--url",
    "--option",
    "--weights",
    "--timeout",
    "--help",
    "--jobs",
}
OUTPUT_OPTIONS = {"--output", "--decisions", "--timeline"}
# Text of examples/my_policy.py -> other texts. No edit runs forever by itself.
EDITS: Sequence[tuple[str, Sequence[str]]] = (
    ("return Plan(chunks=chunks)", (
        "return None", "return 5", "return []", "return Plan", "return Plan(chunks=None)", "return Plan(chunks=[None])",
        "return Plan(chunks=chunks * 2)", "return Plan(chunks=chunks[:0])", "return Plan(chunks=chunks, hold=-1)",
        "return Plan(chunks=chunks, hold='x')", "return Plan(chunks=chunks, hold=Hold(until=-1.0))",
        "raise RuntimeError('a\\nb')",
        "return Plan(chunks=chunks, hold=Hold(until=float('nan')))", "return Plan(chunks=chunks, decode='yes')",
        "raise SystemExit(7)",
        "raise KeyError", "assert False", "assert False, 'text'", "return self.decide(view)", "return Plan(unknown=1)",
        "return Plan(chunks=[Chunk(c.request, 10**9, c.blocks) for c in chunks])", "yield Plan(chunks=chunks)",
        "return Plan(chunks=[Chunk(c.request, c.tokens, 0) for c in chunks])", "raise MemoryError", "return view",
        "return Plan(chunks=[Chunk(c.request, -1, c.blocks) for c in chunks])", "return 1 / 0",
        "return Plan(chunks=[Chunk(c.request, 0, -5) for c in chunks])", "return Plan(chunks=(c for c in chunks))",
        "return Plan(chunks=[Chunk('x', 1, 1)])",
        "return Plan(chunks=[Chunk(c.request, 1.5, c.blocks) for c in chunks])",
        "chunks[0].request.prompt = 0; return Plan(chunks=chunks)", "view.waiting.clear(); return Plan(chunks=chunks)",
        "raise OSError(28, 'No space left')", "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'x')",
        "raise BrokenPipeError",
    )),
    ("return Plan(decode=view.decoding > 0, hold=Hold(until=deadline))", (
        "return Plan()", "return Plan(decode=False, hold=Hold())", "return Plan(decode=True)", "return None",
        "raise ValueError",
        "return Plan(decode=True, hold=10**30)", "return Plan(decode=view.decoding > 0, hold=Hold(until='x'))",
        "return Plan(decode=None)",
        "return Plan(decode=True, hold=Hold(until=view.now))",
        "return Plan(decode=True, hold=Hold(float('nan'), until=float('inf')))",
    )),
    ("batch: int = 64", (
        "batch: int", "batch: 'int' = 64", "batch: int = 'x'", "batch: int = None", "batch: Unknown = 1",
        "batch: list = []",
        "batch: int = 0", "batch: int = -1", "batch = 64", "order: int = 64", "batch: int = 10**400",
        "batch: float = float('nan')",
    )),
    ("class Gather(Policy):", (
        "class Gather:", "class Other(Policy):", "class Gather(Plan):", "class Gather(Policy, metaclass=int):",
        "class Gather(Policy)",
    )),
    ("def decide(self, view: View) -> Plan:", (
        "def choose(self, view):", "def decide(self):", "def decide(self, view, more):",
        "@property\n    def decide(self):", "@staticmethod\n    def decide(view):",
    )),
    ("@dataclass(frozen=True)", ("@dataclass", "", "@dataclass(frozen=True, slots=True)", "@unknown",
    "@dataclass(unknown=1)")),
    ("from dataclasses import dataclass", (
        "import no_such_module", "from dataclasses import nothing", "raise ImportError('x')", "1 / 0", "exit(3)",
        "x = (",
        "raise SystemExit('text')", "print('loaded')\nfrom dataclasses import dataclass", "\0", "# coding: no-such",
        "assert False, 'text'",
    )),
    ('"""Collect waiting prompts until they form a group, or until the oldest one has waited long enough."""', ("",
    '""', "...")),
    ("    batch: int", ("\tbatch: int", "batch: int", "        batch: int")),
)  # fmt: skip


@dataclass
class Case:
    """Files and a command line."""

    files: Files
    argv: list[str]
    written: tuple[str, ...] = ()
    damaged: dict[str, str] = field(default_factory=dict)  # file -> one of DAMAGES

    def write(self, folder: Path) -> None:
        """Write the files into a folder."""
        (folder / "out").mkdir(parents=True, exist_ok=True)
        write_files(folder, {name: data for name, data in self.files.items() if name not in self.damaged})
        for name, damage in self.damaged.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if damage == "folder":
                path.mkdir()
            elif damage == "unreadable":
                path.write_bytes(self.files[name])
                path.chmod(0)
            elif damage == "fifo":
                os.mkfifo(path)
            elif damage in ("endless", "dangling link"):
                path.symlink_to("/dev/zero" if damage == "endless" else "no-such-file")

    def command(self) -> str:
        words = [word if len(word) < 80 else word[:20] + "..." + word[-20:] for word in self.argv]
        return "sim " + shlex.join(words).encode("unicode_escape").decode()

    def describe(self) -> str:
        """Return the files, shortened."""
        lines = [f"{name}: {damage}" for name, damage in self.damaged.items()]
        lines += [f"{name}: {data[:3000]!r}" for name, data in self.files.items() if name not in self.damaged]
        return "\n".join(lines)


def make_case(target: str, inputs: Sequence[Input], rng: random.Random) -> Case:
    """Return a mutated copy of one of the inputs."""
    source = rng.choice(inputs)
    case = Case(dict(source.files), list(rng.choice(source.commands)), source.written)
    if target == "options":
        case.argv = mutate_command(tuple(case.argv), rng)
    elif target == "policy":
        edit_policy(case, rng)
    else:
        mutate_file(case, rng)
    return case


def mutate_file(case: Case, rng: random.Random) -> None:
    """Mutate one file of a case, the first one most often, or replace it by something that is not a file."""
    names = list(case.files)
    folder = names[0].partition("/")[0] + "/"
    if names[0].startswith(folder):  # a folder as input: any of its files
        name = (
            rng.choice([name for name in names if name.startswith(folder)]) if rng.random() < 0.9 else rng.choice(names)
        )
    else:
        name = names[0] if rng.random() < 0.7 else rng.choice(names)
    if rng.random() < 0.03:
        # A result file may be a FIFO with a reader, so writing to one waits.
        case.damaged[name] = rng.choice([d for d in DAMAGES if d != "fifo" or not name.endswith(RESULTS)])
    else:
        case.files[name] = mutate(name, case.files[name], rng)


def edit_policy(case: Case, rng: random.Random) -> None:
    """Replace one or two texts of the policy by texts from the list."""
    code = case.files["my_policy.py"].decode()
    for old, texts in rng.sample(EDITS, rng.choice((1, 1, 2))):
        assert old in code or code != case.files["my_policy.py"].decode(), f"{old} is not in the example"
        code = code.replace(old, rng.choice(texts))
    case.files["my_policy.py"] = code.encode()


def mutate_command(command: Command, rng: random.Random) -> list[str]:
    """Add or change one to three options, or the value of an argument."""
    words = list(command)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.25 or not options_of(command):
            k = rng.randrange(1, len(words))
            if not words[k - 1].startswith("-") and not words[k].startswith("-") and k > 1:
                words[k] = rng.choice(NAMES)
            continue
        action = rng.choice(options_of(command))
        values = OUTPUTS if set(action.option_strings) & OUTPUT_OPTIONS else NUMBERS if action.type else NAMES
        values = (*values, *(action.choices or ()))
        words.append(rng.choice(action.option_strings))
        if action.nargs != 0:
            words.append(rng.choice(values))
    return words


@cache
def options_of(command: Command) -> list[Any]:
    """Return the options of a command, from its parser."""
    from servesim.cli import parser

    current: Any = parser()
    for word in command:
        commands = next((a for a in current._actions if isinstance(a, argparse._SubParsersAction)), None)
        if commands is None:
            break
        current = commands.choices[word]
    return [a for a in current._actions if a.option_strings and not SKIPPED & set(a.option_strings)]
