from dataclasses import dataclass

from servesim.core import FOREVER, Chunk, Plan, Policy, View


@dataclass(frozen=True)
class Gather(Policy):
    """Prompts gather until they make a group, or until the oldest of them has waited long enough."""

    batch: int = 64  # requests that run at once
    group: int = 4  # prompts that are worth stopping the decodes for
    patience: float = 2.0  # seconds after which a prompt need not wait for others

    def decide(self, view: View) -> Plan:
        chunks, free, places = [], view.pool.free, self.batch - len(view.running)
        for request in view.waiting:
            blocks = view.pool.blocks(request.prompt + request.limit)  # all it can ever need: nobody is evicted
            if blocks > free or len(chunks) == places:
                break
            free -= blocks
            chunks.append(Chunk(request, request.pending, blocks))
        due = view.waiting.oldest() + self.patience if chunks else None
        if chunks and (len(chunks) >= min(self.group, places) or not view.running or view.now >= due):
            return Plan(chunks=chunks)
        return Plan(decode=view.decoding > 0, wake=due, hold=FOREVER)
