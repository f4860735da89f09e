"""The page of `sim explore` in a notebook: a server in this process, shown in a frame."""

from __future__ import annotations

import atexit
from html import escape
from typing import Any

from .server import ExploreServer


class Explorer:
    """A page that is served until `stop`, or until Python ends. A notebook shows it."""

    def __init__(self, server: ExploreServer, height: int = 900) -> None:
        self._server = server.start()
        self.url = server.url
        self.height = height
        atexit.register(self.stop)

    def _repr_html_(self) -> str:
        style = "border: 0; width: 100%"
        source = escape(self.url, quote=True)
        return f'<iframe src="{source}" height="{self.height}" style="{style}" allow="clipboard-write"></iframe>'

    def __repr__(self) -> str:
        return f"sim explore at {self.url}"

    def stop(self) -> None:
        """End the server and its workers."""
        atexit.unregister(self.stop)
        self._server.stop()

    def __enter__(self) -> Explorer:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()
