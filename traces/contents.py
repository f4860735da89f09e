"""Contents of prompts in traces: from hash ids, as conversations, as text in files, and edited with their trace."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Optional, Union
from urllib.parse import quote, unquote

import numpy as np
from servesim.core import ClientRequest
from servesim.core.content import Content, content_of_ids, content_of_pieces
from servesim.engine.texts import Text, block_key

from .prefix_tree import PrefixTree

Name = Union[int, str]  # of a text, in files
Pieces = list[tuple[Name, int]]  # names and tokens
MOONCAKE_BLOCK = 512  # tokens per hash id in Mooncake's traces
BAILIAN_BLOCK = 16
ID_SIZES = (MOONCAKE_BLOCK, BAILIAN_BLOCK, 64, 128, 256, 32, 1024, 1)  # tokens per hash id, most common first
CONVERSATION_NOTE = "the prompt of a turn contains the earlier turns and answers of its session"


def contents_from_ids(
    prompts: Sequence[int], hash_ids: Sequence[Sequence[int]], names: Sequence[Any], sizes: Sequence[int] = ID_SIZES
) -> tuple[list[Optional[Content]], dict[int, str]]:
    """Return the contents of prompts with hash ids, and for each row whose ids do not fit its prompt the reason.

    `names`: of the requests. A content is None if the row has no ids, or if they do not fit.
    A file has one id for each block of one size. The last id stands for the rest of the prompt; or, in other files, the
    rest has no id and is a text of its own. The size and the rule that fit most rows are those of the file.
    """
    lengths, counts = np.array(prompts, np.int64), np.array(list(map(len, hash_ids)), np.int64)
    with_ids = counts > 0
    rules = [(size, round_up) for round_up in (True, False) for size in sizes]
    fits = [np.where(with_ids, -(-lengths // size) if up else lengths // size, 0) == counts for size, up in rules]
    best = max(range(len(rules)), key=lambda k: int(fits[k].sum()))  # the first one of equals
    size, round_up = rules[best]
    contents: list[Optional[Content]] = []
    for ids, prompt, name, fit in zip(hash_ids, prompts, names, fits[best].tolist()):
        if not ids or not fit or not prompt:
            contents.append(None)
        elif round_up:
            contents.append(content_of_ids(ids, size, prompt))
        else:
            contents.append(content_of_pieces([*((id, size) for id in ids), (own_text(name), prompt % size)]))
    reason = f"hash ids do not fit the prompt length: expected one per {size} tokens"
    return contents, dict.fromkeys(np.flatnonzero(~fits[best]).tolist(), reason)


def own_text(id: Any) -> str:
    """Return the name of the text that only the prompt of this request has."""
    return f"prompt:{id}"


def own_answer(id: Any) -> str:
    """Return the name of the answer to this request."""
    return f"output:{id}"


def first_turn(id: Any, prompt: int, prefix: Sequence[tuple[Name, int]] = ()) -> Content:
    """Return the content of a prompt that begins with a prefix, and the name of its answer."""
    rest = prompt - sum(tokens for _, tokens in prefix)
    return content_of_pieces([*prefix, (own_text(id), rest)], own_answer(id))


def next_turn(id: Any, prompt: int, before: Content, output: int) -> Content:
    """Return the content of the prompt after a turn and its answer of `output` tokens.

    It starts with both. A prompt that is too short for this does not: its client has cut the conversation.
    """
    end = before.ends[-1] + output
    if before.answer is None or prompt < end:
        return first_turn(id, prompt)
    names, ends = [*before.names, before.answer], [*before.ends, end]
    if prompt > end:
        names.append(own_text(id))
        ends.append(prompt)
    return Content(names, ends, own_answer(id))


def renamed(content: Content, copy: int, first_id: int) -> Content:
    """Return the content with names that another copy of the trace does not have; `first_id` is added to hash ids."""

    def rename(name: Hashable) -> Hashable:
        return name + first_id if type(name) is int else f"{name}#{copy}" if copy else name

    return Content(
        [rename(name) for name in content.names],
        content.ends,
        None if content.answer is None else rename(content.answer),
    )


def next_id(requests: Iterable[ClientRequest]) -> int:
    """Return the first whole number above all hash ids."""
    contents = (request.content for request in requests if request.content is not None)
    return 1 + max((name for content in contents for name in content.names if type(name) is int), default=-1)


def scaled(content: Content, factor: float, prompt: int) -> Content:
    """Return the content of a prompt whose length was multiplied by a factor. Equal beginnings stay equal."""
    ends = [min(prompt, round(end * factor)) for end in content.ends[:-1]] + [prompt]
    tokens = (end - start for start, end in zip((0, *ends), ends))
    return content_of_pieces(zip(content.names, tokens), content.answer)


def id_size(contents: Iterable[Content]) -> Optional[int]:
    """Return the tokens per hash id, if all contents consist of ids of one size that a reader can find out."""
    size, longest = None, 0
    for content in contents:
        ends = list(content.ends)
        if content.answer is not None or set(map(type, content.names)) != {int}:
            return None
        if len(ends) > 1:
            size = size or ends[0]
            if ends[:-1] != list(range(size, size * len(ends), size)):
                return None
        longest = max(longest, ends[-1] - (ends[-2] if len(ends) > 1 else 0))
    sizes = [known for known in ID_SIZES if size is None or known == size]
    return next((known for known in sizes if known >= longest > 0), None)


def hash_ids_of(requests: Sequence[ClientRequest], size: int) -> tuple[list[list[int]], int]:
    """Return one hash id per `size` tokens of every prompt, and the number of requests that got new, unique ids.

    Contents of hash ids of this size keep them. Other contents get ids that name the whole prompt up to the end of a
    block, as those of Mooncake do: two prompts have the same ids as far as their whole blocks are equal.
    """
    keep = id_size([request.content for request in requests if request.content is not None]) == size
    first = next_id(requests) if keep else 0
    known: dict[Hashable, int] = {}  # the id before, tokens, and what they say -> the id
    all_ids: list[list[int]] = []
    for request in requests:
        text, ids = Text(request), list[int]()
        if keep and request.content is not None:
            ids += [name for name in request.content.names if isinstance(name, int)]
        for start in range(len(ids) * size, request.prompt, size):
            tokens = min(size, request.prompt - start)
            block = (ids[-1] if ids else None, tokens, block_key(text, start, tokens))
            ids.append(known.setdefault(block, first + len(known)))
        all_ids.append(ids)
    return all_ids, sum(request.content is None for request in requests)


class TokenTexts:
    """The token ids of the prompts and answers of a file so far, as texts.

    A prompt is the beginning of an earlier prompt and its answer, as far as they agree, and then a text of its own. So
    two contents have as many equal tokens as their prompts.
    """

    def __init__(self) -> None:
        self._tree = PrefixTree(1)
        self._texts: dict[Text, Content] = {}  # tokens of a prompt and its answer -> the texts that they are

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> Content:
        """Return the content of a prompt.

        An answer has the name of an earlier one if it is the same, after the same prompt. An answer that begins as an
        earlier one and then differs has a name of its own: a name stands for one text.
        """
        number, end = len(self._texts), len(prompt) + len(answer)
        tokens = Content((*prompt, *answer), range(1, end + 1))
        text = Text(ClientRequest(number, 0.0, end, 0, content=tokens))
        node, known = self._tree.add(text, end)
        earlier: list[tuple[Hashable, int]] = []
        name: Hashable = own_answer(number)
        if node.text is not None:
            texts = self._texts[node.text]
            earlier = beginning(texts, known)
            if known == end and texts.ends[-2:-1] == [len(prompt)]:
                name = texts.names[-1]
        new = (own_text(number), len(prompt) - known)
        content = content_of_pieces([*beginning(content_of_pieces(earlier), len(prompt)), new], name)
        rest = (name if known <= len(prompt) else f"rest:{number}", end - max(known, len(prompt)))
        self._texts[text] = content_of_pieces([*earlier, new, rest])
        return content


def beginning(content: Content, tokens: int) -> list[tuple[Hashable, int]]:
    """Return the pieces of the first tokens of a content."""
    starts = (0, *content.ends)
    return [(name, min(end, tokens) - start) for name, start, end in zip(content.names, starts, content.ends)]


WHOLE_NUMBER = re.compile(r"-?\d+")


def format_name(name: Hashable) -> str:
    """Return the name of a text for a file with comma-separated values: without spaces, and never like a number."""
    if type(name) is int:
        return str(name)
    text = str(name)
    if WHOLE_NUMBER.fullmatch(text):
        return f"%{ord(text[0]):02X}{text[1:]}"
    return quote(text, safe=":/#", errors="surrogatepass")


def parse_name(text: str) -> Name:
    """Return the name that `format_name` wrote."""
    return int(text) if WHOLE_NUMBER.fullmatch(text) else unquote(text, errors="surrogatepass")


def format_pieces(content: Content) -> str:
    """Return the pieces as text: NAME:TOKENS, separated by spaces."""
    return " ".join(f"{format_name(name)}:{tokens}" for name, tokens in content.pieces)


def parse_pieces(text: str) -> Pieces:
    """Return the pieces that `format_pieces` wrote; raise ValueError if the text has another form."""
    pieces = [part.rpartition(":") for part in text.split()]
    if not all(colon for _, colon, _ in pieces):
        raise ValueError(text)
    return [(parse_name(name), int(tokens)) for name, _, tokens in pieces]
