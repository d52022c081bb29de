"""Train GPT-2 124M with a cross-entropy by Pallas kernels for TPU, which never write the [U, V] logits to memory.

Question    Is a step on a TPU faster by a loss that keeps the logits on the chip and computes them three times?
Reference   Liger Kernel (Hsu et al. 2024, arXiv:2410.10989) and tokamax have such losses.
Change      An objective, which takes the place of the loss in chunks of 512 tokens. It runs on one device or
            by pmap: on a mesh the compiler cannot partition the kernels.
Command     jaxgpt study experiments/benchmarks/fused_loss.py --data.path DIR        DIR: tokens of jaxgpt prepare
            jaxgpt plan experiments/benchmarks/fused_loss.py --topology v6e:1x1      compiles it without a TPU
Hardware    a TPU. `--objective.interpret` runs the kernels elsewhere, slowly, in Pallas's interpreter.
Expected    Faster where 4 D FLOPs take less than half of the time of 18 bytes of memory: on a v6e at width 768, not on a
            v5e or v5p, whose memory is faster for their arithmetic.
Result      Not timed yet, since there was no TPU. In Pallas's interpreter, values and gradients equal those of the
            loss that is computed from the logits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import jaxgpt
from jaxgpt import Experiment, ObjectiveConfig, ParallelConfig, TrainConfig, UserError
from jaxgpt.layers.block import NO_SHARDING
from jaxgpt.presets import gpt2
from jaxgpt.train import LossFn

TILE_V = 1024  # columns of logits that a kernel holds at once
TILE_ELEMENTS = 2**21  # elements in a tile of rows: 2048 rows of width 1024
VMEM_LIMIT = 96 * 2**20  # bytes. v5e and v6e have 128 MiB, v5p 95. By default a kernel may use 16


def fused_nats(
    x_UD: jax.Array,
    head_VD: jax.Array,
    targets_U: jax.Array,
    *,
    smoothing: float = 0.0,
    softcap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return the cross-entropy of each row of `x_UD @ head_VD.T` in nats, float32 nats_U.

    The logits are computed three times, tile by tile: for the sum of their exponentials, for the gradient of x and for
    the head's gradient. That takes 5 products instead of 3, and saves the 18 bytes of traffic that each of U V logits
    costs in jaxgpt's loss in chunks. A width of 768 gains by it on a TPU v6e, which computes 574 FLOPs in
    the time of a byte.

    Args:
        x_UD: the rows, bfloat16 or float32.
        head_VD: the output matrix, in any dtype. Products are in x's, with float32 sums.
        targets_U: int32.
        smoothing: see `loss.next_token_loss`.
        softcap: c in c tanh(logit / c). None means no cap.
        interpret: run without a TPU, slowly, for tests.
    """
    U, D = x_UD.shape
    tile = max([256, *(n for n in (512, 1024, 2048) if n * D <= TILE_ELEMENTS)])
    padding = -U % (tile if tile <= U else 16)  # rows of zeros with gradients of zero
    x_UD, targets_U1 = jnp.pad(x_UD, ((0, padding), (0, 0))), jnp.pad(targets_U, (0, padding))[:, None]
    options = (min(tile, len(x_UD)), smoothing, softcap, interpret)
    return _nats(options, x_UD, head_VD.astype(x_UD.dtype), targets_U1)[:U, 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nats(options: tuple, x_UD: jax.Array, head_VD: jax.Array, targets_U1: jax.Array) -> jax.Array:
    return _nats_forward(options, x_UD, head_VD, targets_U1)[0]


def _nats_forward(options, x_UD, head_VD, targets_U1):
    column = jax.ShapeDtypeStruct((len(x_UD), 1), jnp.float32)
    nats_U1, log_sum_U1 = _call(
        _sum_exponentials, options, (x_UD, head_VD, targets_U1), (column, column), by_rows=True, scratch=[1, 1, 1]
    )
    return nats_U1, (x_UD, head_VD, targets_U1, log_sum_U1)


def _nats_backward(options, residuals, grad_U1):
    x_UD, head_VD, _, _ = residuals
    arrays, D = (*residuals, grad_U1), x_UD.shape[1]
    of_x, of_head = (functools.partial(_add_gradient, of_head=of_head) for of_head in (False, True))
    (x_grad_UD,) = _call(of_x, options, arrays, (x_UD,), by_rows=True, scratch=[D])
    (head_grad_VD,) = _call(of_head, options, arrays, (head_VD,), by_rows=False, scratch=[D])
    return x_grad_UD, head_grad_VD, None


_nats.defvjp(_nats_forward, _nats_backward)


def _call(kernel: Callable, options: tuple, arrays: tuple, outputs: tuple, *, by_rows: bool, scratch: list[int]) -> Any:
    """Run a kernel over all tiles of the logits: row by row of tiles, or column by column.

    `outputs` and `scratch` (widths of float32 arrays) are indexed by the outer loop.
    """
    tile_u, smoothing, softcap, interpret = options
    (U, D), V = arrays[0].shape, len(arrays[1])
    tile_v = min(TILE_V, V)
    tiles = (pl.cdiv(U, tile_u), pl.cdiv(V, tile_v))

    def block(array: Any) -> pl.BlockSpec:
        is_head = array is arrays[1]
        axis = int(is_head == by_rows)  # the grid's axis
        return pl.BlockSpec((tile_v if is_head else tile_u, array.shape[1]), lambda *at: (at[axis], 0))

    grid = tiles if by_rows else tiles[::-1]
    reread = tiles[0] * V * D if by_rows else tiles[1] * U * D  # the array of the inner loop
    products = 1 if kernel is _sum_exponentials else 2
    return pl.pallas_call(
        functools.partial(kernel, V=V, smoothing=smoothing, softcap=softcap),
        grid=grid,
        in_specs=[block(array) for array in arrays],
        out_specs=[block(array) for array in outputs],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        scratch_shapes=[pltpu.VMEM((tile_u if by_rows else tile_v, width), jnp.float32) for width in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * U * V * D,
            transcendentals=U * V,
            bytes_accessed=(reread + (U if by_rows else V) * D * products) * arrays[0].dtype.itemsize,
        ),
        interpret=interpret,
    )(*arrays)


def _tile_of_logits(x_ref, head_ref, target_ref, first_column, V, smoothing, softcap):
    """Return a tile of the logits, of the smoothed targets q, and its part of the head with zeros beyond V."""
    rows = first_column + jax.lax.broadcasted_iota(jnp.int32, (head_ref.shape[0], 1), 0)
    head = jnp.where(rows < V, head_ref[...], jnp.zeros_like(head_ref[...]))
    logits = jax.lax.dot_general(x_ref[...], head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    columns = first_column + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    target = jnp.where(columns == target_ref[...], 1.0 - smoothing, 0.0) + smoothing / V
    is_real = columns < V
    return jnp.where(is_real, logits, -jnp.inf), jnp.where(is_real, target, 0.0), head


def _sum_exponentials(
    x_ref, head_ref, target_ref, nats_ref, log_sum_ref, largest_ref, sum_ref, picked_ref, *, V, smoothing, softcap
):
    """Add a tile to the running maximum, the sum of exponentials and the targets' logits. nats = log sum - q logits."""
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def _():
        largest_ref[...] = jnp.full_like(largest_ref, -jnp.inf)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        picked_ref[...] = jnp.zeros_like(picked_ref)

    logits, target, _ = _tile_of_logits(x_ref, head_ref, target_ref, tile * head_ref.shape[0], V, smoothing, softcap)
    largest = jnp.maximum(largest_ref[...], logits.max(axis=1, keepdims=True))
    exponentials = jnp.exp(logits - largest).sum(axis=1, keepdims=True)
    sum_ref[...] = sum_ref[...] * jnp.exp(largest_ref[...] - largest) + exponentials
    largest_ref[...] = largest
    picked_ref[...] += jnp.where(target > 0.0, logits * target, 0.0).sum(axis=1, keepdims=True)

    @pl.when(tile == pl.num_programs(1) - 1)
    def _():
        log_sum_ref[...] = largest_ref[...] + jnp.log(sum_ref[...])
        nats_ref[...] = log_sum_ref[...] - picked_ref[...]


def _add_gradient(
    x_ref, head_ref, target_ref, log_sum_ref, grad_ref, out_ref, total_ref, *, of_head, V, smoothing, softcap
):
    """Add a tile's part of the gradient of x, gradient @ head, or of the head, gradient.T @ x."""
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def _():
        total_ref[...] = jnp.zeros_like(total_ref)

    first = pl.program_id(0 if of_head else 1) * head_ref.shape[0]
    logits, target, head = _tile_of_logits(x_ref, head_ref, target_ref, first, V, smoothing, softcap)
    gradient = (jnp.exp(logits - log_sum_ref[...]) - target) * grad_ref[...]
    if softcap is not None:
        gradient *= 1.0 - jnp.square(jnp.maximum(logits, -softcap) / softcap)
    contract, other = (0, x_ref[...]) if of_head else (1, head)
    total_ref[...] += jax.lax.dot_general(
        gradient.astype(x_ref.dtype), other, (((contract,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )

    @pl.when(tile == pl.num_programs(1) - 1)
    def _():
        out_ref[...] = total_ref[...].astype(out_ref.dtype)


def fused_next_token_loss(
    model: nn.Module,
    head: Any,
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array | None = None,
    *,
    smoothing: float = 0.0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return `next_token_loss` of hidden states of a `GPT` by `fused_nats`."""
    mask_BT = jnp.ones(targets_BT.shape, bool) if mask_BT is None else mask_BT
    config: Any = model.config  # type: ignore[attr-defined]
    head_VD = head["wte"]["embedding"] if config.tie_embeddings else head["lm_head"]["kernel"].T
    targets_U = jnp.where(mask_BT, targets_BT, 0).reshape(-1)
    x_UD = x_BTD.reshape(-1, x_BTD.shape[-1])
    nats_U = fused_nats(
        x_UD, head_VD, targets_U, smoothing=smoothing, softcap=config.logit_softcap, interpret=interpret
    )
    return jnp.sum(nats_U, where=mask_BT.reshape(-1)), jnp.sum(mask_BT, dtype=jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedLossConfig(ObjectiveConfig):
    """The next token's loss by the kernels of this page."""

    interpret: bool = False  # run without a TPU, slowly

    def make_loss(self, model: nn.Module, *, head_loss: Any = None, label_smoothing: float = 0.0) -> LossFn:
        """Return the loss, which takes the place of the one in chunks."""
        sharding: Any = model.sharding  # type: ignore[attr-defined]
        if sharding is not NO_SHARDING:
            raise UserError(
                "the fused loss runs on one device or by pmap, not on a mesh: take another --parallel.strategy"
            )
        fused = functools.partial(fused_next_token_loss, interpret=self.interpret)
        return super().make_loss(model, head_loss=fused, label_smoothing=label_smoothing)


experiment = Experiment(
    name="fused-loss",
    model=dataclasses.replace(gpt2("124M"), vocab_size=50_304, dropout=0.0, bias=False, remat="dots"),
    objective=FusedLossConfig(),
    parallel=ParallelConfig(micro_batch_size=12, loss_chunk=512),
    train=TrainConfig(steps=100, batch_size=480),
)

variants = {"in chunks": dataclasses.replace(experiment, objective=ObjectiveConfig()), "fused": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
