"""Who may use the server: clients with the key, and whether other machines can reach it."""

from __future__ import annotations

import hmac
import ipaddress
from typing import Any, Optional

from aiohttp import web

from .http import Refused

OPEN_PATHS = ("/health", "/ping")  # probes of a cluster have no key


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_key(key: Optional[str]) -> list[Any]:
    """Return the middleware that rejects requests without the key; none without a key."""
    if key is None:
        return []
    expected = key.encode()

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        matches = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), expected)
        if request.path not in OPEN_PATHS and not (matches and scheme.lower() == "bearer"):
            message = "expected the header Authorization: Bearer KEY with the key of this server"
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
            raise Refused(401, {"detail": message, "error": error})
        response: web.StreamResponse = await handler(request)
        return response

    return [check]
