"""Files of a check for continuous integration: JUnit XML for test reports, Markdown for pull requests."""

from __future__ import annotations

import re
from html import escape
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from servesim.files.write import append, write_text

from .check import Check

NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # file names can have them


def write_junit(check: Check, path: str, allow_undecided: bool = False) -> None:
    """Write one test case per constraint. An undecided one is a failure; it is skipped if that is allowed."""
    root = Element("testsuites")
    suite = SubElement(root, "testsuite", name=f"sim check {xml_text(check.runs.name)}", time="0")
    tags = {"broken": "failure", "undecided": "skipped" if allow_undecided else "failure"}
    head, *body = check.cells
    for row, cells in zip(check.rows, body):
        case = SubElement(
            suite, "testcase", name=xml_text(str(row.bound)), classname=xml_text(check.runs.name), time="0"
        )
        if row.verdict in tags:
            message = ", ".join(f"{name} {cell}" for name, cell in zip(head[1:], cells[1:]))
            SubElement(case, tags[row.verdict], type=row.verdict, message=xml_text(message))
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len([*suite.iter(tag)])))
    SubElement(suite, "system-out").text = xml_text(check.format())
    indent(root)
    write_text(path, tostring(root, "utf-8", xml_declaration=True).decode() + "\n")


def xml_text(text: str) -> str:
    """Return a text without the characters that XML does not allow."""
    return NOT_XML.sub("?", text)


def append_summary(check: Check, path: str) -> None:
    """Add the check as Markdown to the end of a file: several commands of a job write to one summary."""
    names = "; ".join(f"{role} {side.name}" for role, side in check.sides.items())
    head, *body = [[markdown_text(cell) for cell in line] for line in check.cells]
    lines = [head, ["---"] * len(head), *([*cells[:-1], f"**{cells[-1]}**"] for cells in body)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = "".join(f"- {markdown_text(note)}\n" for note in check.notes)
    title = f"## {check.verdict.capitalize()}: {markdown_text(names)}"
    append(path, f"{title}\n\n{table}\n{markdown_text(check.text)}\n\n{notes}\n")


def markdown_text(text: str) -> str:
    """Return a text on one line that is neither HTML nor the end of a cell."""
    return escape(" ".join(text.split()), quote=False).replace("|", "&#124;")
