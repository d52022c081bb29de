"""The mean loss over a fixed set of windows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from jaxgpt.data.pipeline import Batch


def mean_loss(eval_step: Callable, params: dict, batches: Iterable[Batch]) -> tuple[float, int]:
    """(nats per target, number of targets) over all batches; eval_step as `train.eval_step`, compiled.

    Sums are added in float64 on the host, so that a million windows lose nothing.
    """
    nats, count = 0.0, 0.0
    pending: deque = deque()
    for batch in batches:
        pending.append(eval_step(params, batch))
        if len(pending) > 2:  # at most two in flight, see loop.fit
            batch_nats, batch_count = pending.popleft()
            nats, count = nats + float(batch_nats), count + float(batch_count)
    for batch_nats, batch_count in pending:
        nats, count = nats + float(batch_nats), count + float(batch_count)
    assert count, "no targets to evaluate on"
    return nats / count, int(count)
