"""The notebooks: they run on small data, hold no output, and match their Python files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ..conftest import ROOT

FOLDER = ROOT / "notebooks"
NAMES = ("policy_curves", "calibration", "replay_verification")
# Code inserted after the first cell of a notebook, so that it runs in seconds.
SMALL_PARAMETERS = {
    "policy_curves": """
        BASE["workload"] = {"contest": {"X": 5, "T": 20}}
        BASE["engine"]["num_blocks"] = 60
        KNOBS["policy.decode_batch"] = [16, 32]
        KNOBS["engine.num_blocks"] = [60, 120]
        REPLICATIONS, JOBS = 2, 1
    """,
    "calibration": "",
    "replay_verification": """
        SCENARIO["workload"] = {"contest": {"X": 25, "T": 3}}
    """,
}


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES) == {path.stem for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_holds_no_output(name: str) -> None:
    for cell in read(name)["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_matches_its_python_file(name: str) -> None:
    jupytext = pytest.importorskip("jupytext", reason="needs the extra `notebooks`")
    paired = jupytext.read(FOLDER / f"{name}.py")
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in read(name)["cells"]]
    assert cells == [(cell.cell_type, cell.source) for cell in paired.cells], "jupytext --sync notebooks/*.py"


@pytest.mark.parametrize("name", NAMES)
def test_the_first_code_cell_holds_the_parameters(name: str) -> None:
    first = next(cell for cell in read(name)["cells"] if cell["cell_type"] == "code")
    assert first["metadata"]["tags"] == ["parameters"]


@pytest.mark.parametrize("name", NAMES)
def test_every_chart_has_labels_and_a_sentence(name: str) -> None:
    for cell in read(name)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "plt.show()" in source:
            assert "xlabel" in source
            assert "display(Markdown(" in source.partition("plt.show()")[2]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_start_to_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebooks`")
    client = pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONWARNINGS", os.environ.get("PYTHONWARNINGS", "ignore"))
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    first_code = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    lines = [line.strip() for line in SMALL_PARAMETERS[name].splitlines()]
    notebook.cells.insert(first_code + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    client.NotebookClient(
        notebook, timeout=1500, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    charts = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(charts) >= 5
    if os.environ.get("SERVESIM_KEEP"):
        nbformat.write(notebook, Path(os.environ["SERVESIM_KEEP"]) / f"{name}.ipynb")
