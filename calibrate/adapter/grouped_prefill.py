"""Several prompts per prefill inside llm-serving: the server repairs what it sends to the agent and what it reads back.

Server and agent share memory: the server writes the rows of a call, the agent writes the next token of each slot, and
the next decode reads these tokens as its input. With several prompts, the stock server and agent make five mistakes:

- The agent writes all tokens of the group at the slot of each prompt in turn. They overwrite tokens of other slots.
- The server adds the offset of the row to the index of the last token. The agent keeps it and decodes a wrong token.
- Block tables of unequal length do not form one array.
- The length of a prompt ends at its last token that is not the padding token. It may be too short after a preemption.
- Until every slot was used once, a decode reads the tokens of the first n slots, where n slots were used so far.

All repairs are in the server process, so the agents start as usual. Standard library only: the arrays are the server's.

The code of the server is recognised by its source, without importing it. A digest covers the syntax tree of a function
without docstrings, log calls and prints. So comments, formatting and log texts may differ, and the digest does not
depend on the version of Python.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Callable, Optional

from servesim.core import BadInput

VARIABLE = "SERVESIM_MULTI_PREFILL"  # environment: 1 if the agent needs no repair, repair to repair unknown code
TOKENS, LOGPROBS = 5, 6  # shared memory: the tokens (int32) and their log probabilities (float64), one per slot
FAILED = (-1, 0)  # the server's answer for a row of a failed call
MARK = -3  # no token: written before a call to see where the agent writes
# Functions that this module replaces or relies on: module, class.function, digest in llm-serving of May 2024.
KNOWN = (
    ("mindspore_serving.worker.worker", "Worker._predict", "b867716b3f21b35a"),
    ("mindspore_serving.worker.worker", "Worker._get_valid_length", "f74b4e72524acff6"),
    ("mindspore_serving.worker.model_init_multimodel", "DisModel.call", "e416834f699a4362"),
    ("mindspore_serving.worker.model_init_multimodel", "DisModel._assemble_pa_full_inputs", "e2fc625b9eb64d53"),
    ("mindspore_serving.schedule.schedule", "Schedule.upate_entries_after_one_step", "c8b1d632ad6eb6ba"),
    ("mindspore_serving.agent.agent_multi_post_method", "WorkAgent.predict", "875feb794ffe3616"),
    ("mindspore_serving.agent.agent_multi_post_method", "WorkAgent.predict_for_kbk", "0091716ab3983caa"),
    ("mindspore_serving.agent.agent_multi_post_method", "WorkAgent.do_post_sampling", "85d02de43bcfe228"),
)


def install_repair() -> None:
    """Repair the server in this process, if its code is known."""
    mode = os.environ.get(VARIABLE, "")
    if mode not in ("", "1", "repair"):
        raise BadInput(f"{VARIABLE}: expected 1, repair or nothing, got {mode!r}")
    if mode == "1":
        return
    if not mode and (unknown := unknown_functions()):
        raise BadInput(
            f"adapter: prefill_batch above 1: unknown code: {', '.join(unknown)}; set prefill_batch to 1, or "
            f"{VARIABLE}=repair to repair this code all the same, or {VARIABLE}=1 if its agent needs no repair"
        )
    module = server_module("worker.worker")
    repair(module.Worker, getattr(module.DisModel, "_cls", module.DisModel))  # DisModel is a singleton around a class


def server_module(name: str) -> Any:
    """Return a module of the server in this process."""
    try:
        return importlib.import_module(f"mindspore_serving.{name}")
    except ImportError as error:
        why = f"cannot import llm-serving ({error})"
        raise BadInput(f"adapter: {why}; run in its folder, or put that folder into PYTHONPATH") from None


def repair(worker: Any, model: Any) -> None:
    """Repair the classes Worker and DisModel of a server."""
    for kind, names in ((worker, ("_predict", "_get_valid_length")), (model, ("call", "_assemble_pa_full_inputs"))):
        missing = [name for name in names if not hasattr(kind, name)]
        if missing:
            raise BadInput(f"adapter: {kind.__name__} has no {missing[0]}; set prefill_batch to 1")
    repair_lengths(worker)
    repair_calls(model)
    model._assemble_pa_full_inputs = prefill_blocks
    print("servesim repairs prefills of several prompts: lengths, block tables, tokens", file=sys.stderr, flush=True)


def repair_lengths(worker: Any) -> None:
    """Pass the true lengths of prompts on; the stock server searches for the padding."""
    predict, find_lengths = worker._predict, worker._get_valid_length

    def _predict(self: Any, input_ids: Any, is_prefill: bool, *args: Any, **kwargs: Any) -> Any:
        self._prompt_lengths = [len(tokens) for tokens in input_ids] if is_prefill else []
        return predict(self, input_ids, is_prefill, *args, **kwargs)

    def _get_valid_length(self: Any, padded: Any, padding: int) -> Any:
        lengths, rows = find_lengths(padded, padding)
        lengths[:] = self._prompt_lengths
        return lengths, rows

    worker._predict = _predict
    worker._get_valid_length = _get_valid_length


def prefill_blocks(
    self: Any, lengths: Sequence[int], caches: Sequence[Any], seq_length: int, live: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Allocate the blocks of prompts. Return block tables of equal length, and the cache slot of every token.

    Unused columns of a table are -1. Padding tokens go to slot 0: block 0 belongs to no request.
    """
    lengths = [int(length) for length in lengths]  # the server's are numbers of numpy
    for length, cache, is_live in zip(lengths, caches, live):
        if is_live:
            cache.prepare_cache(length)
    size = caches[0].block_size
    width = max(seq_length // size, *(len(cache.block_table) for cache in caches))
    tables = [list(cache.block_table) + [-1] * (width - len(cache.block_table)) for cache in caches]
    slots: list[int] = []
    for length, table in zip(lengths, tables):
        slots += [table[token // size] * size + token % size for token in range(length)]
        slots += [0] * (seq_length - length)
    return tables, slots


def repair_calls(model: Any) -> None:
    """Repair the calls of DisModel: what the agent keeps of a group, and where the tokens are."""
    calls = AgentCalls(model.call)

    def call(
        self: Any, shms: Any, input_ids: Any, index: Any, lengths: Any, reset: Any, is_prefill: bool, live: Any,
        **rows: Any,
    ) -> Any:  # fmt: skip
        if is_prefill:
            return calls.prefill(self, shms, input_ids, lengths, live, rows)
        calls.use_slots_below(self, shms, live, rows)
        return calls.stock(self, shms, input_ids, index, lengths, reset, is_prefill, live, **rows)

    model.call = call


class AgentCalls:
    """The calls of the agent, and the slots that it knows."""

    def __init__(self, stock: Callable[..., Any]) -> None:
        self.stock = stock
        self.used: set[int] = set()
        self._last: tuple[Any, ...] = ()  # arrays of the last prefill, to build another one of the same length

    def prefill(self, model: Any, shms: Any, input_ids: Any, lengths: Any, live: Any, rows: dict[str, Any]) -> Any:
        """Run a prefill. The index of the last token is the same in every row of the group."""
        slots = rows["decode_index_list"]
        self.used.update(slots)
        self._last = input_ids[:1], lengths[:1], rows["seq_length"]
        return call_agent(
            lambda: self.stock(model, shms, input_ids, lengths - 1, lengths, False, True, live, **rows), shms, slots
        )

    def use_slots_below(self, model: Any, shms: Any, live: Sequence[int], rows: dict[str, Any]) -> None:
        """Before a decode, use every slot below the last live one: prefill one padding token in block 0."""
        if len(self.used) >= len(live):
            return
        last = max((slot for slot, is_live in enumerate(live) if is_live), default=0)
        unused = [slot for slot in range(last) if slot not in self.used]
        if unused:
            tokens, length, seq_length = self._last
            selected = select_rows(rows, unused, len(live))
            selected.update(decode_index_list=unused, seq_length=seq_length)
            one = length.repeat(len(unused)) * 0 + 1
            self.prefill(model, shms, tokens.repeat(len(unused), axis=0), one, [0] * len(unused), selected)


def select_rows(rows: dict[str, Any], slots: Sequence[int], batch: int) -> dict[str, Any]:
    """Return the settings of some slots out of those of all slots of a decode."""
    return {
        key: [values[slot] for slot in slots] if isinstance(values, list) and len(values) == batch else values
        for key, values in rows.items()
    }


def call_agent(call: Callable[[], Any], shms: Any, slots: Sequence[int]) -> Any:
    """Run a prefill. Put each token at its slot, restore the other slots, and return the answers in row order."""
    if len(slots) == 1:
        return call()
    end = slots[-1] + len(slots)  # the stock agent last writes the whole group from slots[-1] to here
    with shms[TOKENS].buf[: 4 * end] as memory, memory.cast("i") as tokens:
        after = list(tokens)
        tokens[slots[-1] + 1 :] = array("i", [MARK] * (len(slots) - 1))
        answers, status = call()
        if FAILED not in answers:
            answers = written_answers(shms, list(tokens), slots, answers)
        for slot, (token, _) in zip(slots, answers):
            after[slot] = token
        tokens[:] = array("i", after)
    return answers, status


def written_answers(shms: Any, tokens: list[int], slots: Sequence[int], answers: Any) -> Any:
    """Return the answers of a group from where the agent wrote them: in one piece (stock), or each at its slot."""
    first = slots[-1]
    untouched = [token == MARK for token in tokens[first + 1 :]]
    if all(untouched):
        return answers
    if any(untouched):
        why = "this agent writes the tokens of several prompts to unknown places; set prefill_batch to 1"
        print(f"servesim: {why}", file=sys.stderr, flush=True)
        return [FAILED] * len(slots)
    with shms[LOGPROBS].buf[: 8 * len(tokens)] as memory, memory.cast("d") as logprobs:
        return list(zip(tokens[first:], list(logprobs)[first:]))


def unknown_functions() -> list[str]:
    """Return the known functions that this server does not have, or has with other code."""
    return [
        f"{name} in {module}" for module, name, known in KNOWN if digest_of(source_of(module), name) != known
    ]  # fmt: skip


def source_of(module: str) -> str:
    """Return the source text of a module that is not imported; empty if there is none."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            return ""
        with open(spec.origin, encoding="utf-8") as file:
            return file.read()
    except (ImportError, OSError, ValueError):
        return ""


def digest_of(source: str, name: str) -> Optional[str]:
    """Return the digest of `Class.function` in a source text, None if the text does not define it."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return None
    for part in name.split("."):
        found = [
            node for node in body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == part
        ]  # fmt: skip
        if not found:
            return None
        body = found[-1].body  # the last definition is the one that counts
    return sha256(flat_text(found[-1]).encode()).hexdigest()[:16]


def flat_text(node: ast.AST) -> str:
    """Return a syntax tree as text, the same in every version of Python."""
    parts = [type(node).__name__]
    for field, value in ast.iter_fields(node):
        values = value if isinstance(value, list) else [value]
        kept = [item for item in values if item is not None and not only_tells(item)]
        if kept:
            parts.append(field + "=" + ",".join(flat_text(x) if isinstance(x, ast.AST) else repr(x) for x in kept))
    return f"({' '.join(parts)})"


def only_tells(item: object) -> bool:
    """Whether a statement is a docstring, a log call or a print."""
    if not isinstance(item, ast.Expr):
        return False
    value = item.value
    if isinstance(value, ast.Constant):
        return True
    function = value.func if isinstance(value, ast.Call) else None
    if isinstance(function, ast.Attribute):
        function = function.value
    return isinstance(function, ast.Name) and function.id in ("logging", "logger", "print")
