from dataclasses import dataclass

from servesim.core import Chunk, Hold, Plan, Policy, View


@dataclass(frozen=True)
class Gather(Policy):
    """Collect waiting prompts until they form a group, or until the oldest one has waited long enough."""

    batch: int = 64  # maximum number of running requests
    group: int = 4  # prompts to collect before a prefill interrupts decoding
    patience: float = 2.0  # seconds after which the oldest prompt no longer waits for a group

    def decide(self, view: View) -> Plan:
        chunks, free, max_new = [], view.pool.free, self.batch - len(view.running)
        for request in view.waiting:
            blocks = view.pool.blocks_for(request.prompt + request.limit)  # reserve all: it is never preempted
            if blocks > free or len(chunks) == max_new:
                break
            free -= blocks
            chunks.append(Chunk(request, request.pending, blocks))
        deadline = view.waiting.oldest() + self.patience if chunks else None
        if chunks and (len(chunks) >= min(self.group, max_new) or not view.running or view.now >= deadline):
            return Plan(chunks=chunks)
        return Plan(decode=view.decoding > 0, hold=Hold(until=deadline))  # same until the queues change or the deadline
