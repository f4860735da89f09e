"""The key of a server, which `sim serve` demands and the clients send."""

from __future__ import annotations

import os
from typing import Optional

from servesim.core import BadInput

KEY_VARIABLE = "SERVESIM_API_KEY"  # environment: the key, which `ps` does not show there


def api_key(option: Optional[str] = None) -> Optional[str]:
    """Return the key of the option `--api-key`, else of the environment; None without one."""
    name, key = ("--api-key", option) if option is not None else (KEY_VARIABLE, os.environ.get(KEY_VARIABLE))
    if key is None:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput(f"{name}: expected printable ASCII characters without spaces")
    return key


def key_header() -> dict[str, str]:
    """Return the header that a client sends; empty without a key in the environment."""
    key = api_key()
    return {} if key is None else {"Authorization": f"Bearer {key}"}
