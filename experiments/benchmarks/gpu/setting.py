"""Settings of the measurement: sizes, the checkout of nanoGPT, and a part's time limit."""

import dataclasses
import sys
from pathlib import Path

COMMAND = Path(__file__).resolve().parents[1] / "gpu.py"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The sizes of models, batches and rounds. The defaults are those of the GPU."""

    tiny: bool = False
    nanogpt: str | None = None  # a checkout of it
    seconds: float = 540.0  # that this part has
    # The model that is timed: GPT-2 124M, as nanoGPT trains it.
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    vocab_size: int = 50_304
    contexts: tuple[int, int] = (1024, 4096)
    tokens: int = 32_768  # of a training step
    prompt: int = 64
    new: int = 256  # tokens to decode
    batches: tuple[int, ...] = (1, 8, 32, 128)  # of decoding
    # The model that is compared: small, so that the CPU takes its steps in seconds.
    compared: tuple[int, int, int, int] = (2, 4, 256, 256)  # n_layer, n_head, n_embd, context
    rows: int = 8  # of its batch
    rounds: int = 5
    turn: float = 1.5  # seconds

    def command(self, name: str, context: int) -> list[str]:
        """Return the command of a worker: a process that takes training steps of "jaxgpt" or "nanogpt"."""
        command = [sys.executable, str(COMMAND), "--worker", name, "--context", str(context)]
        command += ["--tiny"] if self.tiny else []
        return command + (["--nanogpt", self.nanogpt] if self.nanogpt else [])


TINY = {
    **{"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 96, "contexts": (16, 32), "tokens": 64, "prompt": 4},
    **{"new": 6, "batches": (1, 2), "compared": (1, 2, 16, 16), "rows": 2, "rounds": 2, "turn": 0.02},
}


def make_setting(options) -> Setting:
    """Return the setting of the command's options."""
    sizes = TINY if options.tiny else {}
    return Setting(tiny=options.tiny, nanogpt=options.nanogpt, seconds=options.budget, **sizes)
