"""A stand-in for llm-serving's worker and agent, written from their behaviour: names, shapes, messages, shared memory.

It makes the mistakes of the real ones with several prompts per prefill. A message is a function call, not a socket.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from .llm_serving_standin import EntryStatus

END_TOKEN = 2
SEGMENTS = 9
ROWS, SAMPLING, TOKENS, LOGPROBS, TABLES, SLOTS = 0, 4, 5, 6, 7, 8


class Settings(NamedTuple):
    batch: int  # slots
    seq_length: Optional[int]  # of padded prompts; None: the longest prompt of the call
    decode_seq_length: int  # the width of a block table, in tokens
    pad_token_id: int = 0


class Shm:
    """A segment of shared memory."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.buf = memoryview(bytearray(size))

    def view(self, shape: Any, dtype: Any) -> Any:
        return np.ndarray(shape, dtype=dtype, buffer=self.buf)


class Worker:
    """Server side: pads the prompts of a call."""

    def __init__(self, settings: Settings, model: Any) -> None:
        self.settings, self.model = settings, model
        self.shms = [Shm() for _ in range(SEGMENTS)]
        self.valid_length: Any = None
        self.current_index: Any = None

    def predict(self, current_batch_size: int, entry_metadata_list: list[Any]) -> list[tuple[int, float]]:
        is_prefill = entry_metadata_list[0].is_prompt
        data = [entry.get_entry_data() for entry in entry_metadata_list]
        tokens = [each.get_all_tokens() if is_prefill else each.get_all_tokens()[-1] for each in data]
        live = [int(each.get_status() is EntryStatus.RUNNING) for each in data]
        settings = {
            "do_sample_list": [each.do_sample for each in data],
            "top_k_list": [each.top_k for each in data],
            "top_p_list": [each.top_p for each in data],
            "temperature_list": [each.temperature for each in data],
            "repetition_penalty": [each.repetition_penalty for each in data],
            "decode_index_list": [each.decode_index for each in data],
            "cache_engine_list": [entry.cache_engine for entry in entry_metadata_list],
        }
        return self._predict(tokens, is_prefill, live, current_batch_size=current_batch_size, **settings)

    def _predict(
        self, input_ids: Any, is_prefill: bool, valid_batch_flag: list[int], current_batch_size: int, **settings: Any
    ) -> list[tuple[int, float]]:
        length = self.settings.decode_seq_length
        if is_prefill:
            length = self.settings.seq_length or max(map(len, input_ids))
            padding = self.settings.pad_token_id
            input_ids = np.array([[*row, *[padding] * (length - len(row))] for row in input_ids])
            self.valid_length, rows = self._get_valid_length(input_ids, padding)
            self.current_index = (self.valid_length - 1 + length * np.arange(rows)).astype(np.int32)
        answers, _ = self.model.call(
            self.shms, np.array(input_ids, np.int32), self.current_index, self.valid_length, not is_prefill, is_prefill,
            valid_batch_flag, extra_inputs=[], current_batch_size=current_batch_size, seq_length=length, **settings,
        )  # fmt: skip
        return answers  # type: ignore[no-any-return]

    @staticmethod
    def _get_valid_length(origin_inputs: Any, default_padding_values: int) -> tuple[Any, int]:
        """Search for the padding: wrong if the last token is the padding token."""
        ends = [np.flatnonzero(row != default_padding_values)[-1] + 1 for row in origin_inputs]
        return np.array(ends, np.int32), len(ends)


class DisModel:
    """Server side: writes a call to the shared memory and reads the answers."""

    def __init__(self, send: Callable[[str], str]) -> None:
        self.send = send

    def call(
        self, shms: list[Shm], input_ids: Any, current_index: Any, valid_length: Any, init_reset: Any,
        is_first_iteration: bool, valid_batch_flag: list[int], extra_inputs: Any = None,
        current_batch_size: Optional[int] = None, **kwargs: Any,
    ) -> tuple[list[tuple[int, float]], int]:  # fmt: skip
        slots, shapes = kwargs["decode_index_list"], []
        if is_first_iteration:
            columns = [current_index, np.zeros(len(input_ids)), valid_length]
            rows = np.concatenate([input_ids, np.stack(columns, axis=1).astype(np.int32)], axis=1)
            keys = ("do_sample_list", "top_p_list", "top_k_list", "temperature_list", "repetition_penalty")
            sampling = np.array([kwargs[key] for key in keys] + [slots], np.float16).T
            shapes = [write(shms[ROWS], rows), write(shms[SAMPLING], sampling)]
        assemble = self._assemble_pa_full_inputs if is_first_iteration else self._assemble_pa_inc_inputs
        blocks = assemble(valid_length, kwargs["cache_engine_list"], kwargs["seq_length"], valid_batch_flag)
        shapes += [write(shms[at], np.array(values, np.int32)) for at, values in zip((TABLES, SLOTS), blocks)]
        if is_first_iteration:
            message = "*" + ",".join(shapes)
        else:
            message = "_".join(["a", str(current_batch_size), " ".join(map(str, valid_batch_flag)), *shapes])
        if self.send(message) == "2":
            return [(-1, 0)] * len(slots), 1
        tokens = shms[TOKENS].view((max(slots) + 1,), np.int32)
        logprobs = shms[LOGPROBS].view((max(slots) + 1,), np.float64)
        return [(int(tokens[slot]), float(logprobs[slot])) for slot in slots], 1

    def _assemble_pa_full_inputs(
        self, batch_valid_length: Any, cache_engine_list: list[Any], seq_length: int, valid_batch_flag: list[int]
    ) -> tuple[list[list[int]], list[int]]:
        """The tables are as wide as whole blocks of the padded length; a longer table makes the rows unequal."""
        tables, slots = [], []
        for length, cache, live in zip(batch_valid_length, cache_engine_list, valid_batch_flag):
            if live:
                cache.prepare_cache(int(length))
            blocks, size = cache.block_table, cache.block_size
            tables.append(blocks + [-1] * (seq_length // size - len(blocks)))
            slots += [blocks[k // size] * size + k % size if k < length else 0 for k in range(seq_length)]
        return tables, slots

    def _assemble_pa_inc_inputs(
        self, batch_valid_length: Any, cache_engine_list: list[Any], seq_length: int, valid_batch_flag: list[int]
    ) -> tuple[list[list[int]], list[int]]:
        tables, slots = [], []
        for cache, live in zip(cache_engine_list, valid_batch_flag):
            if live:
                cache.prepare_cache(1)
            last = cache.num_token - 1 if live else 0
            blocks, size = cache.block_table, cache.block_size
            tables.append(blocks + [-1] * (seq_length // size - len(blocks)))
            slots.append(blocks[last // size] * size + last % size)
        return tables, slots


def write(shm: Shm, values: Any) -> str:
    """Write an array to a segment and return its shape as text."""
    shm.view(values.shape, values.dtype)[:] = values
    return " ".join(map(str, values.shape))


class SlotState:
    """What the agent keeps of a slot."""

    def __init__(self, current_index: int, valid_length: int) -> None:
        self.current_index, self.valid_length = current_index, valid_length


class WorkAgent:
    """Device side: reads a call from the shared memory, runs the model, writes the next tokens."""

    def __init__(self, settings: Settings, model: Any) -> None:
        self.settings, self.model = settings, model
        self.shms: list[Shm] = []
        self.decode_params_map: dict[int, SlotState] = {}
        self.row = np.full(settings.decode_seq_length, settings.pad_token_id)  # shared by all rows of a decode

    def handle(self, message: str) -> str:
        try:
            if message.startswith("*"):
                self.predict([[int(n) for n in shape.split(" ")] for shape in message[1:].split(",")])
            else:
                _, batch, live, *shapes = message.split("_")
                self.predict(
                    [[int(n) for n in shape.split(" ")] for shape in shapes],
                    int(batch),
                    list(map(int, live.split(" "))),
                )
        except RuntimeError:
            return "2"
        return "1"

    def predict(
        self, shape_list: list[list[int]], current_batch: Optional[int] = None, flags: Optional[list[int]] = None
    ) -> None:
        is_prefill = flags is None
        tables = self.shms[TABLES].view(shape_list[-2], np.int32)
        cache_slots = self.shms[SLOTS].view(shape_list[-1], np.int32)
        if flags is None:
            rows = self.shms[ROWS].view(shape_list[0], np.int32)
            input_ids, indexes, lengths = rows[:, :-3], rows[:, -3], rows[:, -1]
            slots = self.shms[SAMPLING].view(shape_list[1], np.float16)[:, 5].astype(int).tolist()
            for slot, index, length in zip(slots, indexes, lengths):
                self.decode_params_map[slot] = SlotState(int(index), int(length))
        else:
            assert current_batch is not None
            slots = list(range(current_batch))
            input_ids, lengths = self._decode_rows(current_batch, flags)
        logits = self.model.forward(
            input_ids=input_ids, valid_length_each_example=lengths.astype(np.int64), block_tables=tables,
            slot_mapping=cache_slots, prefill=is_prefill,
        )  # fmt: skip
        self.do_post_sampling(logits, self.shms[TOKENS], self.shms[LOGPROBS], slots, is_prefill)

    def _decode_rows(self, batch: int, flags: list[int]) -> tuple[Any, Any]:
        """Return the rows of a decode, with the last token of each slot at its index, and the lengths."""
        known = min(len(self.decode_params_map), batch)  # not the slots that are known, but as many
        tokens = [*self.shms[TOKENS].view((known,), np.int32), *[END_TOKEN] * (batch - known)]
        for slot in range(batch):
            state = self.decode_params_map.setdefault(slot, SlotState(0, 1))
            state.current_index += 1
            state.valid_length += 1
        states = [self.decode_params_map[slot] if flags[slot] else SlotState(0, 1) for slot in range(batch)]
        rows = []
        for token, state in zip(tokens, states):
            self.row[state.current_index : state.current_index + 1] = token  # nothing if the index is too large
            rows.append(self.row.copy())
        return np.array(rows), np.array([state.valid_length for state in states])

    def do_post_sampling(
        self, outputs: Any, outputs_shm: Shm, output_logprob_shm: Shm, decode_index: list[int], prefill: bool = True
    ) -> None:
        tokens = outputs.argmax(axis=-1).astype(np.int32)
        logprobs = outputs.max(axis=-1).astype(np.float64)
        for slot in decode_index if prefill else [0]:
            end = slot + len(tokens)
            outputs_shm.view((end,), np.int32)[slot:] = tokens
            output_logprob_shm.view((end,), np.float64)[slot:] = logprobs


class TokenModel:
    """A model whose cache holds tokens. The next token depends on all tokens that a row reads from its blocks."""

    VOCABULARY = 40

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache = np.full(blocks * block_size, -1)
        self.groups: list[int] = []  # prompts of each prefill
        self.fails = False

    def forward(
        self, input_ids: Any, valid_length_each_example: Any, block_tables: Any, slot_mapping: Any, prefill: bool
    ) -> Any:
        if self.fails:
            raise RuntimeError("predict failed")
        lengths, size = valid_length_each_example, self.block_size
        if prefill:
            self.groups.append(len(input_ids))
            assert len(slot_mapping) == input_ids.size
            own = slot_mapping[slot_mapping >= size]  # block 0 takes the padding
            assert len(set(own)) == len(own), "two tokens in one slot"
            self.cache[slot_mapping] = input_ids.reshape(-1)
        else:
            self.cache[slot_mapping] = input_ids[np.arange(len(lengths)), lengths - 1]
        logits = np.zeros((len(lengths), self.VOCABULARY))
        for row, (length, table) in enumerate(zip(lengths, block_tables)):
            positions = np.arange(length)
            history = self.cache[table[positions // size] * size + positions % size]
            logits[row, next_token(history.tolist())] = 1 + row
        return logits


def next_token(history: list[int]) -> int:
    """Return a token that depends on the order of all tokens; often 0, the padding token, but never the end token."""
    value = 0
    for token in history:
        value = (value * 31 + token + 7) % 1_000_003
    return (0, 1, 3, *range(3, 40))[value % 40] if value % 3 else 0
