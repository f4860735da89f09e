"""Tables fit a terminal, numbers stay whole, and colours appear only where they are wanted."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from servesim.files.terminal import PLAIN, Screen, align_columns, paint

from ..pseudo_terminal import on_terminal, without_colours
from ..study import sweeps

HEAD = ["rank", "makespan", "changed settings", "labels"]
ROW = ["1", "3,552 s", "decode_batch=64 prefill_batch=4 order=longest-output", "on the front, saturated"]
TABLE = [HEAD, ROW]


def test_a_table_for_a_pipe_has_its_natural_width() -> None:
    assert align_columns(TABLE) == align_columns(TABLE, Screen(200, False))
    assert align_columns(TABLE)[1] == f"1     3,552 s   {ROW[2]}  {ROW[3]}"


@pytest.mark.parametrize("width", [40, 50, 60, 80])
def test_text_columns_are_wrapped_between_words_and_numbers_stay_whole(width: int) -> None:
    lines = align_columns(TABLE, Screen(width, False), ["changed settings", "labels"])
    assert max(map(len, lines)) <= max(width, 47), "the longest words need 4 + 8 + 20 + 9 columns and 3 gaps"
    assert lines[1].startswith("1     3,552 s   decode_batch=64")
    words = " ".join(lines).split()
    assert all(word in words for cell in ROW for word in cell.split())


@pytest.mark.parametrize("width", [30, 40, 50])
def test_cells_never_break_inside_a_number(width: int) -> None:
    cells = ["1", "8.29 ± 0.29", "-3.20 ± 0.40 %", "+1.00 % [-2.00, +4.00]", "a b"]
    lines = align_columns([["rank", "mean_e2el (s)", "vs. baseline", "change", "changed settings"], cells],
                          Screen(width, False), ["changed settings"])  # fmt: skip
    text = "\n".join(lines)
    assert all(number in text for number in ("8.29 ± 0.29", "-3.20 ± 0.40 %", "+1.00 %", "[-2.00, +4.00]"))


def test_a_very_long_word_is_broken() -> None:
    lines = align_columns([["name", "value"], ["x" * 200, "7"]], Screen(60, False), ["name"])
    assert max(map(len, lines)) <= 60 and "".join(lines).count("x") == 200


def test_paint_marks_only_lines_with_a_meaning() -> None:
    colours = Screen(80, True)
    assert paint("a", "winner", colours) == "\033[1;32ma\033[0m"
    assert paint("a", "", colours) == paint("a", "winner", PLAIN) == "a"
    painted = align_columns(TABLE, colours, meanings={1: "winner"})
    assert [without_colours(line) for line in painted] == align_columns(TABLE, Screen(80, False))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished sweep, whose table `sim sweep DIR` prints again."""
    folder = tmp_path_factory.mktemp("terminal")
    file = sweeps.sweep_file(folder, subject_to=["mean_tpot_ms <= 23"])
    assert sweeps.sim("sweep", file, "-o", folder / "out", "-j", 1, "-q", "--no-report") == 0
    return folder / "out"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
def test_sweep_fits_the_terminal_and_has_colours(
    swept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = ["sweep", str(swept), "-j", "1", "-q", "--no-report"]
    assert sweeps.sim(*again) == 0
    plain = capsys.readouterr().out
    assert "\033" not in plain
    text = on_terminal(again, columns=80)
    assert "\033[1;32m" in text and "\033[33m" in text, "a winner, and a configuration that cannot win"
    table = without_colours(text).split("configurations, ")[0].splitlines()[:-1]
    assert max(map(len, table)) <= 80 < max(map(len, plain.split("configurations, ")[0].splitlines()[:-1]))
    assert set(plain.split("configurations, ")[0].split()) == set(" ".join(table).split()) | {"7"}
    monkeypatch.delenv("NO_COLOR", raising=False)
    cases: list[tuple[list[str], dict[str, str], bool]] = [
        ([], {"TERM": "xterm"}, True),
        (["--json"], {"TERM": "xterm"}, False),
        ([], {"TERM": "dumb"}, False),
        ([], {"TERM": "xterm", "NO_COLOR": "1"}, False),
    ]
    for words, env, colours in cases:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        shown = Terminal()
        monkeypatch.setattr(sys, "stdout", shown)
        assert sweeps.sim(*again, *words) == 0
        assert ("\033" in shown.getvalue()) == colours, env
        assert not words or json.loads(shown.getvalue())["winner"] is not None
