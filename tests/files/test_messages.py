"""Messages about values of any size: one short line, at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from servesim.cli import main
from servesim.core import BadInput

VALUES = "&a [x, x, x, x, x, x, x, x, x]"
for old, new in zip("abc", "bcd"):
    VALUES = f"&{new} [{VALUES}, {', '.join([f'*{old}'] * 8)}]"
BOMB = VALUES
for old, new in zip("defghijkl", "efghijklm"):
    BOMB = f"&{new} [{BOMB}, {', '.join([f'*{old}'] * 8)}]"
RUN = "workload: {contest: {X: 5, T: 2}}\n"


@pytest.mark.parametrize("value", [VALUES, BOMB], ids=["allowed", "too many"])
@pytest.mark.parametrize(
    "text",
    [
        "policy: {name: vllm, order: VALUE}",
        "policy: {name: VALUE}",
        "profile: {kind: linear, base: VALUE}",
        "profile: VALUE",
        "engine: {num_blocks: VALUE}",
        "trace: VALUE",
        "unknown: VALUE",
    ],
)
def test_aliases_do_not_expand_in_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, value: str
) -> None:
    (tmp_path / "a.yaml").write_text(RUN + text.replace("VALUE", value) + "\n")
    assert main(["run", str(tmp_path / "a.yaml")]) == 2  # to expand them all would never end
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert len(message) < 1000


def test_a_message_is_one_line_of_limited_length() -> None:
    message = str(BadInput("first\nsecond\r\n" + "x" * 10**6 + " the end"))
    assert message.startswith("first second xxx")
    assert message.endswith("the end")
    assert len(message) <= 800
