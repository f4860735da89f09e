"""Random requests as mappings of JSON: closed loops, conversations, shared texts, several answers, failures."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from servesim.core import ClientRequest, Sampling
from servesim.core.content import content_of_pieces

Row = dict[str, Any]  # arguments of ClientRequest; of a content its pieces and answer, of a sampling its arguments


def client_request(row: Row) -> ClientRequest:
    """Return the request that a row describes."""
    fields = dict(row)
    if "content" in row:
        fields["content"] = content_of_pieces(*row["content"])
    if "sampling" in row:
        fields["sampling"] = Sampling(*row["sampling"])
    return ClientRequest(**fields)


def random_requests(rng: random.Random, drafts: bool) -> list[Row]:
    """Return random requests with one answer: simultaneous arrivals, whole seconds, limits above the output.

    With drafts, no model call fails, and a request may have a rate of acceptance.
    """
    longest, with_failures, now = rng.choice([12, 12, 30, 60, 60, 250]), not drafts and rng.random() < 0.2, 0.0
    gaps = rng.choice([[0, 0, 0, 0.012, 0.1, 0.5, 1], [0, 0.012, 0.05], [0, 0, 0.012], [0.1, 1, 3]])
    rows: list[Row] = []
    for number in range(rng.randint(5, rng.choice([10, 20, 40]))):
        now += rng.choice(gaps)
        output = rng.randint(1, longest)
        name = number if rng.random() < 0.6 else f"r{number}#job_name[{rng.choice('abc')}]#"  # a job of vllm-ascend
        limit = rng.choice([output, output, output + 5, max(1, output - 3)])
        row: Row = {"id": name, "arrival": now, "prompt": rng.randint(1, 60), "output": output, "limit": limit}
        rows.append({**row, "priority": rng.randint(0, 2)})
        if with_failures and rng.random() < 0.3:
            rows[-1]["fails_at_token"] = rng.randint(1, output)
        if drafts:
            rows[-1]["acceptance"] = rng.choice([0.0, 0.5, 0.9, 1.0])
    add_followers(rng, rows)
    add_texts(rng, rows)
    return rows


def add_followers(rng: random.Random, rows: Sequence[Row]) -> None:
    """Let requests follow others in some cases: in a closed loop with a few users, or any earlier ones."""
    kind, users = rng.random(), rng.choice([1, 2, 4])
    for number, row in enumerate(rows):
        if kind < 0.1 and number >= users:
            row["follows"] = rows[number - users]["id"]
        elif 0.1 <= kind < 0.2 and number and rng.random() < 0.5:
            row |= {"follows": rng.choice(rows[:number])["id"], "session": "chat"}
        if "follows" in row:
            row["think_time"] = rng.choice([0.0, 0.25, 1.0])


def add_texts(rng: random.Random, rows: Sequence[Row]) -> None:
    """Let prompts share texts in most cases: system prompts, earlier turns of a session, or any tree of texts."""
    kind = rng.choice(["", "", "prefixes", "sessions", "tree"])
    prefixes, follow = [rng.choice([8, 24, 48, 100]) for _ in range(rng.randint(1, 3))], rng.random() < 0.1
    last: dict[str, Row] = {}  # of each session
    for row in rows:
        pieces: list[tuple[str, int]] = []
        if kind == "prefixes" and rng.random() < 0.8:
            number = rng.randrange(len(prefixes))
            pieces = [(f"prefix {number}", prefixes[number])]
        elif kind == "sessions":
            row["session"] = f"session {rng.randrange(4)}"
            before = last.get(row["session"])
            if before is not None and before["prompt"] < 200:
                pieces = [*before["content"][0], (before["content"][1], before["output"])]
                if follow:
                    row |= {"follows": before["id"], "think_time": rng.choice([0.0, 0.3])}
            last[row["session"]] = row
        elif kind == "tree":
            pieces = [(f"level {level} {rng.randint(0, 1)}", 16) for level in range(rng.randint(1, 5))]
        if kind == "tree" and rng.random() < 0.3:  # equal prompts
            row["prompt"] = sum(tokens for _, tokens in pieces)
        elif kind:
            pieces.append((f"prompt {row['id']}", row["prompt"]))
            row["prompt"] = sum(tokens for _, tokens in pieces)
        if kind:
            row["content"] = [pieces, f"answer {row['id']}"]


def add_answers(rng: random.Random, rows: Sequence[Row], in_group: bool) -> None:
    """Let some requests have several answers; `in_group`: the engine runs them as the sequences of one request."""
    followed = {row.get("follows") for row in rows}
    for row in rows:
        if rng.random() < 0.5 or (row["id"] in followed and not in_group) or "fails_at_token" in row:
            continue
        best_of, beam_search = rng.randint(2, 4), in_group and rng.random() < 0.3
        wanted = rng.randint(1, best_of) if in_group and not beam_search else best_of
        outputs = [row["output"], *(rng.randint(1, row["output"]) for _ in range(best_of - 1))]
        row["sampling"] = [wanted, best_of, beam_search, outputs if rng.random() < 0.5 else []]
