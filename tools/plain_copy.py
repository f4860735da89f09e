"""Copy the installed servesim without its compiled modules: python tools/plain_copy.py FOLDER

With the folder on PYTHONPATH, `import servesim` is plain Python. Tests and benchmarks compare it with the compiled one.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path


def plain_copy(folder: Path) -> None:
    """Write the package `servesim` in plain Python into a folder; an older copy there is replaced."""
    spec = importlib.util.find_spec("servesim")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    shutil.rmtree(folder / "servesim", ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd")
    shutil.copytree(package, folder / "servesim", ignore=ignored)
    for name in ("policies", "routers", "calibrate", "traces"):  # an editable installation has them beside `sim`
        if not (folder / "servesim" / name).exists():
            shutil.copytree(package.parent / name, folder / "servesim" / name, ignore=ignored)


if __name__ == "__main__":
    plain_copy(Path(sys.argv[1]))
