"""The optimiser, its schedule, and the training loop."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxgpt.config.validate import (
    LARGEST_SIZE,
    Checked,
    Count,
    Fraction,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Size,
)
from jaxgpt.errors import UserError

if TYPE_CHECKING:
    import optax

    from jaxgpt.config.model import GPTConfig
    from jaxgpt.train import Metrics, Params

MAX_NEW_TOKENS = 400  # default length of a sample
# A decay that float32 rounds to 1 would make the optimiser divide by 0.
Decay = Annotated[float, Interval(ge=0, lt=0.999999)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig(Checked):
    """The optimiser and its schedule.

    >>> optim = OptimConfig(name="muon", learning_rate=3e-3, schedule="wsd")
    """

    name: Literal["adamw", "muon"] = "adamw"  # muon: Muon (Jordan 2024) trains the blocks' matrices, AdamW the rest
    learning_rate: PositiveFloat = 1e-3  # peak learning rate of AdamW
    muon_learning_rate: PositiveFloat = 0.02  # peak learning rate of Muon
    # learning rate after warm-up. wsd stays at the peak, then falls linearly to the minimum (arXiv:2405.18392). inverse_sqrt has no minimum
    schedule: Literal["cosine", "wsd", "inverse_sqrt", "constant"] = "cosine"
    # steps in which the learning rate rises from 0. More than train.steps count as None. None means a tenth of train.steps, at most 100
    warmup_steps: NonNegativeInt | None = None
    # earlier values of train.steps of a run that was extended: the steps up to each follow the schedule that ends there
    horizons: tuple[int, ...] = ()
    decay_fraction: Annotated[float, Interval(gt=0, le=1)] = 0.2  # share of the steps in which wsd decays
    min_lr_ratio: Annotated[float, Interval(ge=0, le=1)] = 0.1  # final learning rate divided by its peak
    beta1: Decay = 0.9  # decay rate of AdamW's first moment
    beta2: Decay = 0.99  # decay rate of AdamW's second moment
    eps: PositiveFloat = 1e-8  # number added to AdamW's denominator
    weight_decay: NonNegativeFloat = 0.1  # decay of matrices only, multiplied by the learning rate
    momentum: Decay = 0.95  # momentum of Muon
    grad_clip: PositiveFloat | None = 1.0  # largest global norm of the gradients. None means no clipping
    label_smoothing: Fraction = 0.0  # share of each target spread over all tokens, in training only (arXiv:1512.00567)
    max_skipped: Count = 10  # steps skipped in a row, as not finite, after which the run ends

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("learning_rate", "muon_learning_rate")[: 1 + (self.name == "muon")]:
            rate = getattr(self, name)
            decayed = self.weight_decay * rate
            if decayed > 1.0:  # a step would subtract more than the whole matrix and reverse its sign
                raise UserError(f"weight_decay={self.weight_decay} times {name}={rate} is {decayed:g}: needs at most 1")

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the optimizer of a run of `steps` steps, which trains this model.

        Its update may take `value_and_grad`, a function of parameters that returns the mean loss of the batch and its
        gradient, as for a line search.
        """
        from jaxgpt.optim import make_optimizer  # a configuration is read without JAX

        return make_optimizer(self, steps, width_ratio=model.width_ratio, label_parameter=model.label_parameter)

    def make_schedule(self, steps: int) -> optax.Schedule:
        """Return the learning rate as a function of the steps taken. It is logged unless the optimizer's state has one."""
        from jaxgpt.optim import learning_rate

        return learning_rate(self, steps)

    def metrics(self, grads: Params, updates: Params, opt_state: Any) -> Metrics:
        """Return scalars of a step to log, by name, of its gradients, its updates and the optimizer's state after it."""
        return {}

    def eval_params(self, opt_state: Any, params: Params) -> Params:
        """Return the parameters that are validated, saved as the model and sampled: a subclass may average, for example."""
        return params

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of `steps` steps."""
        first = (*self.horizons, steps)[0]
        return min(100, first // 10) if self.warmup_steps is None or self.warmup_steps > first else self.warmup_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    """The training loop. A step is one optimiser step, whatever the devices and the accumulation.

    >>> train = TrainConfig(steps=600, batch_size=16, eval_every=100)
    """

    steps: Annotated[int, Interval(ge=1, le=2_100_000_000)] = 1000  # number of optimiser steps, counted in 32 bits
    batch_size: Size = 32  # sequences per optimiser step, over all devices and micro-batches
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 0  # seed of weights, data order and dropout
    # run, or directory or Hub id of a model: start from its weights, tokenizer and architecture. dropout, remat,
    # scan_layers and a shorter block_size may differ. None means random weights
    init_from: str | None = None
    # dtype of activations. auto is float32 on CPU, bfloat16 on GPU and TPU
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # attention kernel. auto is splash on TPU, cudnn on Nvidia GPUs, where shape and dropout allow, else plain. native is
    # for CPUs, in C++, built by this machine's compiler on first use
    attention: Literal["auto", "plain", "native", "xla", "cudnn", "splash"] = "auto"
    log_every: PositiveInt = 10  # steps between lines of metrics.jsonl
    log_layers: bool = False  # each line has the gradient norm of each layer as well: grad_norm/h_0
    profile: str | None = None  # steps to trace by JAX's profiler into RUN/profile, such as 20:25. None means no steps
    eval_every: PositiveInt = 250  # steps between validations. The last step has one too
    eval_tokens: PositiveInt | None = None  # tokens per validation, spread evenly over the split. None means all
    checkpoint_every: PositiveInt = 1000  # steps between checkpoints. The best validation and the end are kept as well
    keep_last: PositiveInt = 2  # newest checkpoints kept besides the best. The second is read if the first is damaged
    keep_every: PositiveInt | None = None  # checkpoints at multiples of this many steps stay. None means no such steps
    sample_prompt: str = ""  # prompt of the sample at the end. An empty one means the tokenizer's start token
    sample_tokens: Annotated[int, Interval(ge=0, le=LARGEST_SIZE)] = MAX_NEW_TOKENS  # tokens of the sample at the end
    sample_temperature: NonNegativeFloat = 0.8  # temperature of the sample at the end

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_from == "":
            raise UserError("train.init_from is empty: name a run or a model, or leave the option out")
