"""Requests as JSON, from the parent to a worker: Python 3.9, standard library only."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Union

from servesim.core import Request
from servesim.core.content import content_of_pieces
from servesim.core.request import CLIENT_FIELDS


def request_to_json(request: Request) -> list[Any]:
    """Return what the client asks as JSON; `requests_from_json` reads it."""
    fields, content = dict(zip(CLIENT_FIELDS, request.client_fields())), request.content
    if content is not None:
        pieces = [(name_to_json(name), tokens) for name, tokens in content.pieces]
        fields["content"] = {"pieces": pieces, "answer": name_to_json(content.answer)}
    return list(fields.values())


def name_to_json(name: Hashable) -> Union[int, str, None]:
    """Return the name of a text as JSON. A Python program may use any value as a name."""
    return name if name is None or isinstance(name, (int, str)) else repr(name)


def requests_from_json(rows: Iterable[Sequence[Any]]) -> list[Request]:
    """Return unserved requests; `request_to_json` writes the rows."""
    requests = []
    for row in rows:
        fields = dict(zip(CLIENT_FIELDS, row))
        content = fields["content"]
        fields["content"] = content_of_pieces(content["pieces"], content["answer"]) if content else None
        requests.append(Request(**fields))
    return requests
