"""Make the notebooks from their Python files and run them: python tools/run_notebooks.py [NAME ...]

notebooks/NAME.py is the source. NAME.ipynb gets the same cells, with the output of a run. A run with the same packages
writes the same file: times, versions of Python and names of machines are left out. Pictures get a small palette, which
makes them about a third of the size.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
CELL_TIMEOUT_S = 600
COLOURS = 64  # of a picture


def run_notebook(source: Path) -> None:
    """Write the notebook of a Python file with its outputs."""
    target = source.with_suffix(".ipynb")
    notebook: Any = jupytext.read(source)
    keep_ids(notebook, target)
    resources = {"metadata": {"path": str(source.parent)}}
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, record_timing=False, resources=resources)
    client.execute()
    shrink_pictures(notebook)
    notebook.metadata = {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    }
    nbformat.write(notebook, target)
    print(f"{target.relative_to(FOLDER.parent)}: {target.stat().st_size / 1e3:.0f} kB")


def shrink_pictures(notebook: Any) -> None:
    """Give every PNG a palette of its most frequent colours."""
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            picture = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB")
            small = io.BytesIO()
            picture.quantize(COLOURS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
            output.data["image/png"] = base64.b64encode(small.getvalue()).decode()


def keep_ids(notebook: Any, target: Path) -> None:
    """Give every cell the id that it has in the stored notebook, else its number: random ids would always differ."""
    stored = nbformat.read(target, as_version=4).cells if target.exists() else []
    ids = {(cell.cell_type, cell.source): cell.id for cell in stored}
    used: set[str] = set()
    for number, cell in enumerate(notebook.cells):
        name = ids.get((cell.cell_type, cell.source), f"cell-{number}")
        cell.id = name if name not in used else f"cell-{number}-new"
        used.add(cell.id)


def main(names: list[str]) -> None:
    sources = [FOLDER / f"{name}.py" for name in names] or sorted(FOLDER.glob("*.py"))
    with tempfile.TemporaryDirectory() as home:  # no start-up files and history of the user
        os.environ.update({"IPYTHONDIR": home, "MPLBACKEND": "module://matplotlib_inline.backend_inline"})
        for source in sources:
            run_notebook(source)


if __name__ == "__main__":
    main(sys.argv[1:])
