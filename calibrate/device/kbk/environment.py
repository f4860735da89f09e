"""The environment of the kbk backend: frameworks, versions, device name, environment variables."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Optional

from servesim.calibrate.device.worker import first_line
from servesim.core import BadInput

INSTALL = "pip install mindspore==2.9.0 mindformers==1.9.0 'numpy<2'"


def frameworks() -> tuple[Any, Any]:
    """Import mindspore and mindformers without log output; if that fails, raise BadInput with the fix."""
    os.environ.setdefault("GLOG_v", "3")
    try:
        import mindformers
        import mindspore
    except ImportError as error:
        raise BadInput(
            f"kbk: {sys.executable} cannot import mindspore and mindformers ({first_line(error)}); "
            f"install them there ({INSTALL}), or name another interpreter with --worker-python"
        ) from error
    return mindspore, mindformers


@contextmanager
def environment(**variables: Optional[str]) -> Iterator[None]:
    """Set or remove environment variables temporarily. MindFormers reads its mode from them when it builds a model."""
    previous = {name: os.environ.get(name) for name in variables}
    set_variables(variables)
    try:
        yield
    finally:
        set_variables(previous)


def set_variables(variables: dict[str, Optional[str]]) -> None:
    """Set environment variables, or remove those that are None."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def device_name(ms: Any, device: str) -> str:
    """Return a readable device name."""
    if device == "Ascend":
        return str(ms.hal.get_device_name(0))
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"CPU {names[0] if names else platform.machine()} x {os.cpu_count()}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect step times."""
    packages = {name: version(name) for name in ("mindspore", "mindformers", "numpy")}
    return {"python": platform.python_version(), **packages}
