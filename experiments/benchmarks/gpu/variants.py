"""The options of the training step that trade memory for speed, each compared with the default step."""

import functools
import time
from collections.abc import Callable, Iterator

from gpu.row import Row
from gpu.setting import Setting
from gpu.steps import gpt2_experiment, make_steps

VARIANTS = {
    "as it is": {},
    "all logits at once": {"loss_chunk": 1},
    "logits in 8 chunks": {"loss_chunk": 8},
    "layers scanned": {"scan_layers": True},
    "layers scanned, remat dots": {"scan_layers": True, "remat": "dots"},
    "2 micro-batches": {"micro_batch_size": 2},
}


def checks(setting: Setting) -> list[Callable[[], Iterator[Row]]]:
    """Return one check for each variant."""
    return [functools.partial(vary, setting, name) for name in VARIANTS]


def vary(setting: Setting, name: str) -> Iterator[Row]:
    """Time the steps of one variant."""
    context, options = setting.contexts[0], dict(VARIANTS[name])
    if "loss_chunk" in options:  # a number of chunks here, and of tokens there
        options["loss_chunk"] = context // options["loss_chunk"]
    if "micro_batch_size" in options:  # likewise, of sequences there
        options["micro_batch_size"] = setting.tokens // context // options["micro_batch_size"]
    _, run = make_steps(gpt2_experiment(setting, context, **options))
    run(3)
    seconds = []
    for _ in range(setting.rounds):
        began = time.perf_counter()
        run(10)
        seconds.append((time.perf_counter() - began) / 10)
    yield Row(what=f"train, {name}", values=[setting.tokens / x for x in seconds], unit="tokens/s")
