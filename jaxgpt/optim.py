"""The optimiser, as one optax.chain, and its schedule."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxgpt.config.model import GPTConfig
from jaxgpt.config.training import OptimConfig
from jaxgpt.errors import UserError

LabelParameter = Callable[[tuple[str, ...], tuple[int, ...]], str]  # see `GPTConfig.label_parameter`
by_rank: LabelParameter = GPTConfig().label_parameter
LABELS = ("matrix", "table", "vector")


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

    def extended(step):
        return jnp.select([step < end for end in config.horizons], [s(step) for s in earlier], last(step))

    return extended


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
    products have JAX's default precision: float32 on CPU, TF32 on GPU, bfloat16 on TPU.

    `label_parameter` and `width_ratio` are as in `GPTConfig`, the ratio for `scale_by_width`. It does not scale the
    decay: the decay's time scale should not depend on the width (arXiv:2405.13698). Nor does it scale Muon: Muon's
    updates have one spectral norm at all widths, as muP needs (arXiv:2310.17813).
    """
    relative = relative_schedule(config, steps)
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
    adamw = optax.chain(
        adam if width_ratio == 1.0 else optax.chain(adam, scale_by_width(width_ratio, label_parameter)),
        optax.add_decayed_weights(
            config.weight_decay,
            mask=lambda params: jax.tree.map(
                lambda label: label != "vector", label_parameters(params, label_parameter)
            ),
        ),
        optax.scale_by_learning_rate(learning_rate(config, steps)),
    )
    muon = optax.contrib.muon(
        lambda step: config.muon_learning_rate * relative(step),
        beta=config.momentum,
        weight_decay=config.weight_decay,
        # Otherwise the layer axis of scanned kernels would count as part of the matrix.
        muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda _: optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1), params
        ),
    )

    def choose(params: optax.Params) -> dict:
        labels = label_parameters(params, label_parameter)
        return jax.tree.map(lambda label: "muon" if label == "matrix" else "adamw", labels)

    update = adamw if config.name == "adamw" else optax.partition({"adamw": adamw, "muon": muon}, choose)
    return optax.chain(
        optax.identity() if config.grad_clip is None else optax.clip_by_global_norm(config.grad_clip), update
    )


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
