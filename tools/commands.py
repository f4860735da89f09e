"""The reference of every command, written from the parser itself: python tools/commands.py > docs/commands.md

Not argparse's own help, whose layout changes from one Python to the next.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from servesim.cli import parser

HEAD = """\
# Commands

Every command, its arguments and options, written from the program itself by `tools/commands.py`.

Exit codes: 0 fine, 1 a run failed, 2 wrong usage or input (one line says what was expected),
3 a tolerance or objective was missed, 130 interrupted.
`python -m servesim` is the same program as `sim`.
"""


def commands(top: argparse.ArgumentParser, name: str = "sim", about: str = "") -> Iterator[tuple[str, str, Any]]:
    """Return every command that can be run: its name, the line its parent says of it, its parser."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for word, inner in action.choices.items():
                yield from commands(inner, f"{name} {word}", said.get(word, ""))
            return
    yield name, about, top


def reference() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(section(*command) for command in commands(parser()))])


def section(name: str, about: str, inner: argparse.ArgumentParser) -> str:
    """Return one command's part."""
    text = sentence(inner.description or about)
    lines = [f"## {name}", "", f"`{synopsis(name, inner)}`", "", text, ""]
    for group in inner._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if actions:
            title = group.title or ""
            plain = title in ("positional arguments", "options")
            lines += [] if plain else [f"**{title}**", ""]
            lines += [*(item(action) for action in actions), ""]
    return "\n".join(lines)


def synopsis(name: str, inner: argparse.ArgumentParser) -> str:
    """Return how a command is called, options summed up."""
    places = [action for action in inner._actions if not action.option_strings]
    named = [a for a in inner._actions if a.option_strings and a.required]
    words = [f"{action.option_strings[-1]} {operand(action)}" for action in named]
    return " ".join([name, "[options]", *words, *(operand(action) for action in places)])


def operand(action: argparse.Action) -> str:
    """Return what stands for an action's value."""
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
    """Return one argument's line."""
    if not action.option_strings:
        head = operand(action)
    elif action.nargs == 0:
        head = ", ".join(action.option_strings)
    else:
        head = f"{', '.join(action.option_strings)} {operand(action)}"
    text = (action.help or "").replace("%%", "%")
    more = " (may be given several times)" if isinstance(action, argparse._AppendAction) else ""
    return f"- `{head}`: {text}{more}" if text else f"- `{head}`{more}"


def sentence(text: str) -> str:
    """Return text that begins and ends as a sentence does."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


if __name__ == "__main__":
    print(reference(), end="")
