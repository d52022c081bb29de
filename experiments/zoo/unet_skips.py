"""U-net skips: late blocks read what entered the early ones, by learned weights.

Question    Does a path around the middle blocks let a small Transformer learn more from the same tokens?
Reference   modded-nanogpt, https://github.com/KellerJordan/modded-nanogpt, record 11 of 2024-11-10, after Ronneberger,
            Fischer and Brox 2015, arXiv:1505.04597, "U-Net".
Change      What enters block i is kept, and added to the stream after block n-1-i, times a learned weight, for the first
            half of the blocks. So the embedding joins the last block's output, and of four blocks the middle two have a
            path around them: two parameters more. modded-nanogpt adds the early blocks' outputs before the late ones,
            which is the same but for the embedding's path, and leaves out its own innermost pair, which would add the
            stream to itself. Its weights start at 1, as here.
Command     jaxgpt study experiments/zoo/unet_skips.py
Expected    No difference that eight seeds can see with four blocks: the residual stream is such a path already.
Result      At equal tokens +0.0013 ± 0.0101, against 1.8287 (0.0053). At 15.6 s +0.0004 ± 0.0350, against 1.8599
            (0.0234). Eight seeds, one core of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     No more than noise, as expected; at 124M one skip was slightly worse.
"""

import dataclasses
from collections.abc import Callable

import base
import jax
from flax import linen as nn

import jaxgpt
from jaxgpt.config.validate import NonNegativeFloat
from jaxgpt.errors import UserError
from jaxgpt.layers.block import Compute


class UNetGPT(jaxgpt.GPT):
    """A GPT with a skip connection around each of the nested spans of blocks."""

    def setup(self) -> None:
        super().setup()
        init = nn.initializers.constant(self.config.first_skip)
        self.skip = self.param("skip", init, (self.config.n_layer // 2,))  # a weight for each span, the widest first

    def run_blocks(self, x_BTD: jax.Array, run_block: Callable[..., jax.Array], tokens_BT: jax.Array) -> jax.Array:
        """Run the blocks in turn. Add to the output of the late ones what entered their early counterparts."""
        kept, last = [], len(self.h) - 1
        for layer, block in enumerate(self.h):
            if layer < len(self.skip):
                kept.append(x_BTD)
            x_BTD = run_block(block, x_BTD)
            if last - layer < len(self.skip):
                x_BTD = x_BTD + self.skip[last - layer].astype(x_BTD.dtype) * kept.pop()
        return x_BTD


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNetConfig(jaxgpt.GPTConfig):
    """A GPT with U-net skips."""

    has_cache = True
    first_skip: NonNegativeFloat = 1.0  # initial weight of each skip connection

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scan_layers or self.n_layer < 2:
            got = f"scan_layers={self.scan_layers}, n_layer={self.n_layer}"
            raise UserError(f"{got}: skips connect different layers, so take scan_layers=False and two layers or more")

    def make_model(self, compute: Compute | None = None) -> UNetGPT:
        return UNetGPT(self, *(compute or Compute()))


experiment = dataclasses.replace(
    base.experiment, name="zoo-unet-skips", model=UNetConfig(**dataclasses.asdict(base.experiment.model))
)
variants = {"baseline": base.experiment, "U-net skips": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
