"""The optimiser, as one optax.chain, and its schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxgpt.config.serialize import Checked
from jaxgpt.config.validate import Count, Decay, Fraction, Interval, NonNegativeFloat, NonNegativeInt, PositiveFloat
from jaxgpt.errors import UserError
from jaxgpt.model import GPTConfig
from jaxgpt.train import Metrics, Params

LabelParameter = Callable[[tuple[str, ...], tuple[int, ...]], str]  # see `GPTConfig.label_parameter`
by_rank: LabelParameter = GPTConfig().label_parameter
LABELS = ("matrix", "table", "vector")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig(Checked):
    """The optimiser, which turns gradients into updates, and the schedule of its learning rate.

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
    # dtype of Muon's products. bfloat16 multiplies all of one shape at once. auto: as train.dtype on GPU, else float32
    muon_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
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
        return make_optimizer(self, steps, width_ratio=model.width_ratio, label_parameter=model.label_parameter)

    def make_schedule(self, steps: int) -> optax.Schedule:
        """Return the learning rate as a function of the steps taken. It is logged unless the optimizer's state has one."""
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


def relative_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Return the learning rate relative to its peak at each step: linear warm-up, then `config.schedule`.

    In a run that was extended, the steps up to each of `config.horizons` follow the schedule that ends there.

    The warm-up starts at 1 / (warm-up steps + 1), so that step 0 counts. cosine and wsd reach the minimum at `steps`.
    inverse_sqrt decays as 1 / sqrt(step) without end (Vaswani et al. 2017, equation 3, with a peak of
    1 / sqrt(n_embd warmup_steps)).
    """
    *earlier, last = (_schedule_until(end, config, config.warmup(steps)) for end in (*config.horizons, steps))
    if not earlier:
        return last
    ends = config.horizons
    return lambda step: jnp.select([jnp.less(step, end) for end in ends], [s(step) for s in earlier], last(step))


def _schedule_until(steps: int, config: OptimConfig, warmup: int) -> optax.Schedule:
    low = config.min_lr_ratio
    rest = max(1, steps - warmup)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(1.0, rest, alpha=low)
    elif config.schedule == "wsd":
        decay = max(1, min(rest, round(steps * config.decay_fraction)))
        after = optax.linear_schedule(1.0, low, decay, transition_begin=rest - decay)
    elif config.schedule == "inverse_sqrt":

        def after(step):
            return jnp.sqrt((warmup + 1) / (warmup + 1 + step))

    else:
        after = optax.constant_schedule(1.0)
    ramp = optax.linear_schedule(1.0 / (warmup + 1), 1.0, warmup)
    return optax.join_schedules([ramp, after], [warmup])


def learning_rate(config: OptimConfig, steps: int) -> optax.Schedule:
    """Return AdamW's learning rate at each step. Muon's has the same shape."""
    relative = relative_schedule(config, steps)
    return lambda step: config.learning_rate * relative(step)


def make_optimizer(
    config: OptimConfig, steps: int, *, width_ratio: float = 1.0, label_parameter: LabelParameter = by_rank
) -> optax.GradientTransformation:
    """Chain clipping and AdamW, or with name="muon" Muon for the blocks' matrices and AdamW for the rest.

    AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101, with weight decay on matrices only. Muon: Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/. Both decays are multiplied by the learning rate. Muon's Newton-Schulz
    products in float32 have JAX's default precision: float32 on CPU, TF32 on GPU, bfloat16 on TPU.

    `label_parameter` and `width_ratio` are as in `GPTConfig`, the ratio for `scale_by_width`. It does not scale the
    decay: the decay's time scale should not depend on the width (arXiv:2405.13698). Nor does it scale Muon: Muon's
    updates have one spectral norm at all widths, as muP needs (arXiv:2310.17813).
    """

    def is_decayed(params):
        return jax.tree.map(lambda label: label != "vector", label_parameters(params, label_parameter))

    clip = optax.identity() if config.grad_clip is None else optax.clip_by_global_norm(config.grad_clip)
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
    if width_ratio != 1.0:
        adam = optax.chain(adam, scale_by_width(width_ratio, label_parameter))
    decay = optax.add_decayed_weights(config.weight_decay, mask=is_decayed)
    adamw = optax.chain(adam, decay, optax.scale_by_learning_rate(learning_rate(config, steps)))
    if config.name == "adamw":
        return optax.chain(clip, adamw)

    def choose(params: optax.Params) -> dict:
        labels = label_parameters(params, label_parameter)
        return jax.tree.map(lambda label: "muon" if label == "matrix" else "adamw", labels)

    relative = relative_schedule(config, steps)
    together = config.muon_dtype == "bfloat16"
    if together:
        from jaxgpt.layers.gpu import orthogonalize
    # Otherwise the layer axis of scanned kernels would count as part of the matrix.
    last_two = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    momentum = optax.contrib.scale_by_muon(
        beta=config.momentum,
        ns_steps=0 if together else 5,
        preconditioning="aol" if together else "frobenius",  # without steps aol leaves the momentum as it is
        weight_dimension_numbers=lambda params: jax.tree.map(lambda _: last_two, params),
    )
    muon = optax.chain(
        momentum,
        optax.stateless(lambda updates, _: scale_by_shape(orthogonalize(updates) if together else updates)),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(lambda step: config.muon_learning_rate * relative(step)),
    )
    # `optax.contrib.muon` has an AdamW for no parameters beside it, and so has the state in checkpoints.
    adam = optax.adamw(relative)
    muon = optax.partition({"muon": muon, "adam": adam}, lambda params: jax.tree.map(lambda _: "muon", params))
    return optax.chain(clip, optax.partition({"adamw": adamw, "muon": muon}, choose))


def scale_by_shape(updates: optax.Updates) -> optax.Updates:
    """Multiply the update of a matrix [D, F] by sqrt(F / D) where that is above one."""
    return jax.tree.map(lambda x: jnp.sqrt(jnp.maximum(1, x.shape[-1] / x.shape[-2])) * x, updates)


def scale_by_width(ratio: float, label_parameter: LabelParameter = by_rank) -> optax.GradientTransformation:
    """Multiply Adam's updates of matrices in blocks and of the last norm by muP's ratio, base width / width.

    Table 8 of arXiv:2203.03466: initial variance and learning rate of the blocks' matrices take the ratio. So do the logits, by the last norm: its
    scale starts at the ratio, with a learning rate of the same factor (lemma J.1). All else is the same at every width.
    """

    def scale(path, x: jax.Array, label: str) -> jax.Array:
        in_block = label == "matrix" and _name(path[-1]) not in ("lora_a", "lora_b")
        return ratio * x if in_block or _name(path[0]) == "ln_f" else x

    return optax.stateless(
        lambda updates, _: jax.tree.map_with_path(scale, updates, label_parameters(updates, label_parameter))
    )


def label_parameters(params: optax.Params, label: LabelParameter = by_rank) -> dict:
    """Return the label of each parameter. Raises `UserError` for one that is not a label."""

    def find(path, x: jax.Array) -> str:
        names = tuple(_name(entry) for entry in path)
        if (found := label(names, x.shape)) not in LABELS:
            raise UserError(f"label_parameter says {found!r} of {'/'.join(names)}: needs one of {', '.join(LABELS)}")
        return found

    return jax.tree.map_with_path(find, params)


def _name(entry) -> str:
    return str(getattr(entry, "key", entry))
