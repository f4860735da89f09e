"""How the next token of each row is selected: on the device as a part of the model call, or on the host."""
# mypy: allow-untyped-calls
# (parts of torch.cuda have no annotations)

from __future__ import annotations

import time

import torch

VARIANTS = ("device", "host")  # the first one is the default


class Selection:
    """Reads the tokens that the device selected, or selects from the logits on the host: the first of equal ones.

    A copy to pinned memory and a busy wait react faster than a blocking copy. Steps with more rows than `logits` are
    copied without it.
    """

    def __init__(self, logits: torch.Tensor, cuda: bool) -> None:
        self.cuda = cuda
        rows, vocab = logits.shape
        if cuda:
            self.host_tokens = torch.zeros(rows, dtype=torch.int64, pin_memory=True)
            self.host_logits = torch.zeros(0, vocab)
            self.done = torch.cuda.Event()

    def read_tokens(self, next_tokens: torch.Tensor) -> list[int]:
        """Return tokens that the device has selected."""
        if self.cuda and len(next_tokens) <= len(self.host_tokens):
            next_tokens = self._copy(next_tokens, self.host_tokens)
        tokens: list[int] = next_tokens.tolist()
        return tokens

    def select_on_host(self, logits: torch.Tensor) -> list[int]:
        """Copy the logits to the host and select there, with numpy: threads of torch would make single steps slow."""
        logits = logits.float()
        if self.cuda and len(logits) <= len(self.host_tokens):
            if not len(self.host_logits):  # many megabytes, which only this variant needs
                shape = len(self.host_tokens), logits.shape[1]
                self.host_logits = torch.zeros(*shape, pin_memory=True)
            logits = self._copy(logits, self.host_logits)
        tokens: list[int] = logits.cpu().numpy().argmax(axis=1).tolist()
        return tokens

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target = target[: len(source)]
        target.copy_(source, non_blocking=True)
        self.done.record()
        while not self.done.query():
            time.sleep(0)  # releases the interpreter lock for other threads
        return target
