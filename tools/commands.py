"""Generate the command reference from the parser: python tools/commands.py > docs/commands.md

It does not use argparse's own help text, because its layout differs between Python versions.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from servesim.cli import Parser, parser

HEAD = """\
# Commands

This page is for users of the command line. It answers: which commands and options does `sim` have?
`--help` of a command prints the texts in full, with defaults and examples. Options behind "in" are explained there.
`-o` names the file or folder that a command writes.

| exit code | meaning |
| --- | --- |
| 0 | success |
| 1 | a run, a policy, a device or a server failed; `sim check`: undecided |
| 2 | wrong command line or input; one line names the expected value |
| 3 | an error or metric is outside the given tolerance or bound |
| 130 | interrupted (Ctrl-C) |

Results go to standard output; progress, warnings and errors go to standard error.
On a terminal, tables fit its width and have colours, unless the environment variable `NO_COLOR` is set.
Pipes and files get plain text.
`python -m servesim` is the same program as `sim`.

## Shared options

These options have the same meaning in several commands.
`--help` of a command says which of them it has, and their defaults.

"""

SHARED_BY = 2  # an option with the same text in this many commands is described once, at the top
REMARK = re.compile(r" \([^()]*(?:default|repeatable)[^()]*\)")
PAGES = {  # commands whose options another page explains
    "sim recommend": "recommend.md", "sim explore": "explore.md", "sim sweep": "capacity.md", "sim tune": "tune.md",
    "sim capacity": "capacity.md", "sim check": "ci.md",
    "sim calibrate vllm": "calibrate-server.md", "sim calibrate endpoint": "calibrate-server.md",
    "sim calibrate probe": "calibrate.md", "sim calibrate import layers": "imports.md",
    "sim calibrate import steps": "imports.md", "sim calibrate import results": "imports.md",
    "sim calibrate derive": "derive.md", "sim replay": "replay.md", "sim serve": "serve.md",
    "sim policies prove": "installed-engine.md",
}  # fmt: skip
CODE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
DOCS = Path(__file__).resolve().parent.parent / "docs"
SHARED_GROUPS = ("model and device by name", "scenario", "device", "server", "editing")


def commands(top: Parser, name: str = "sim", about: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield every command: its name, its one-line help, its parser."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            help_lines = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for word, inner in action.choices.items():
                yield from commands(inner, f"{name} {word}", help_lines.get(word, ""))
            return
    top.finish()
    yield name, about, top


def reference() -> str:
    """Return the whole page."""
    known = list(commands(parser()))
    shared = shared_options([inner for _, _, inner in known])
    lines = [line for title, group in shared.items() for line in (f"\n**{title}**\n", *group.values())]
    return "\n".join([HEAD + "\n".join(lines).lstrip("\n") + "\n", *(section(*one, shared) for one in known)])


def options(inner: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """Yield the options of a command, except --help and -o: title of the group, name, line."""
    for group in inner._action_groups:
        title = (group.title or "").partition(" (")[0].replace("options", "general")
        for action in group._group_actions:
            if action.option_strings and not {"-h", "-o"} & {*action.option_strings}:
                yield title, action.option_strings[-1], item(action)


def shared_options(parsers: list[argparse.ArgumentParser]) -> dict[str, dict[str, str]]:
    """Return the lines that several commands have, by title and name; of two meanings, the commoner."""
    known = [option for inner in parsers for option in options(inner)]
    counts = Counter((name, meaning(line)) for _, name, line in known)
    common = {name: one for (name, one), count in reversed(counts.most_common()) if count >= SHARED_BY}
    shared: dict[str, dict[str, str]] = {}
    for title, name, line in known:
        if common.get(name) == meaning(line) and not any(name in group for group in shared.values()):
            texts = Counter(text for _, other, text in known if (other, meaning(text)) == (name, meaning(line)))
            shared.setdefault(title if title in SHARED_GROUPS else "general", {})[name] = texts.most_common(1)[0][0]
    return shared


def meaning(line: str) -> str:
    """Return what tells two options of one name apart: the placeholder, and two words of the text."""
    return " ".join(line.replace(":", " ").split()[:5])


def section(name: str, about: str, inner: argparse.ArgumentParser, shared: Mapping[str, Mapping[str, str]]) -> str:
    """Return the section of one command: its own options, without the shared ones."""
    common = {option: line for group in shared.values() for option, line in group.items()}
    own = {option: line for _, option, line in options(inner) if meaning(line) != meaning(common.get(option, ""))}
    page = PAGES.get(name, "")
    text = CODE.sub("", (DOCS / page).read_text(encoding="utf-8")) if page else ""
    elsewhere = [option for option in own if re.search(rf"{option}(?![\w-])", text)]
    known = [line for option, line in own.items() if option not in elsewhere]
    if elsewhere:
        known.append(f"- in [{page.removesuffix('.md')}]({page}): {', '.join(f'`{one}`' for one in elsewhere)}")
    about = sentence(first_sentence(inner.description or about))
    needed = [
        f"`{action.option_strings[-1]}`" for action in inner._actions if action.option_strings and action.required
    ]
    operands = [operand(action) for action in inner._actions if not action.option_strings]
    usage = f"`{' '.join([name, *operands])}`: " if operands else ""
    lines = [f"## {name}", "", usage + about + (f" Required: {', '.join(needed)}." if needed else ""), ""]
    return "\n".join([*lines, *known, ""] if known else lines)


def operand(action: argparse.Action) -> str:
    """Return the placeholder of an argument's value."""
    word = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices is not None else action.dest.upper()
    )
    word = " ".join(word) if isinstance(word, tuple) else word
    if action.nargs == "?":
        return f"[{word}]"
    if action.nargs == "*":
        return f"[{word} ...]"
    return f"{word} [{word} ...]" if action.nargs == "+" else word


def item(action: argparse.Action) -> str:
    """Return the line of one option."""
    if action.nargs == 0:
        head = ", ".join(action.option_strings)
    else:
        head = f"{', '.join(action.option_strings)} {operand(action)}"
    text = short((action.help or "").replace("%%", "%"))
    return f"- `{head}`: {text}" if text else f"- `{head}`"


def short(text: str) -> str:
    """Return a help text without defaults, examples, and remarks after a semicolon."""
    return first_sentence(re.split(r"; |, e\.g\. ", REMARK.sub("", text))[0])


def first_sentence(text: str) -> str:
    """Return a text up to its first full stop, which is not that of "e.g." or of "..."."""
    return re.split(r"(?<!e\.g)(?<!\.)\.(?= )", text)[0]


def sentence(text: str) -> str:
    """Return text with a capital letter at the start and a full stop at the end."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


if __name__ == "__main__":
    print(reference(), end="")
