"""An engine without a model: it repeats the prompt."""

import threading
import time

from jaxgpt.sample.engine import Piece, Request
from jaxgpt.sample.score import PromptScores


class FakeEngine:
    def __init__(self, slots: int = 2, delay: float = 0.0, endless: bool = False):
        """Start with free slots. endless: no request reaches its length, so that only leaving frees a slot."""
        self.slots, self.delay, self.endless = slots, delay, endless
        self.running: dict[int, list] = {}  # slot: [request, tokens so far]
        self.gate = threading.Event()  # closed, it holds every step
        self.gate.set()
        self.cancelled, self.submitted, self.steps = [], 0, 0

    @property
    def num_free(self):
        return self.slots - len(self.running)

    def submit(self, request: Request) -> int:
        slot = next(n for n in range(self.slots) if n not in self.running)
        self.running[slot] = [request, 0]
        self.submitted += 1
        return slot

    def step(self, burst: int = 8) -> list[Piece]:
        assert self.gate.wait(30)
        time.sleep(self.delay)
        self.steps += 1
        pieces = []
        for slot, (request, done) in list(self.running.items()):
            count = burst if self.endless else min(burst, request.max_new_tokens - done)
            ids = [request.prompt[n % len(request.prompt)] for n in range(done, done + count)]
            stop = next((n for n, i in enumerate(ids) if i in request.stop_tokens), None)
            ids, finish = (ids, None) if stop is None else (ids[:stop], "stop")
            self.running[slot][1] += len(ids)
            if finish is None and done + count == request.max_new_tokens and not self.endless:
                finish = "length"
            if finish:
                del self.running[slot]
            wanted = request.top_logprobs
            logprobs = [] if wanted is None else [-0.5] * len(ids)
            top = [] if wanted is None else [[(i, -0.5), (0, -1.5)][:wanted] for i in ids]
            pieces.append(Piece(slot, ids, logprobs, top, finish))
        return pieces

    def cancel(self, slot: int) -> None:
        self.cancelled.append(slot)
        del self.running[slot]

    def cached_tokens(self, slot: int) -> int:
        return 0


def fake_score(ids) -> PromptScores:
    return PromptScores([float("nan"), *[-1.0] * (len(ids) - 1)], [[], *[[(i, -1.0), (0, -2.0)] for i in ids[1:]]])
