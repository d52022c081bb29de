"""Build an experiment's model, optimiser and compiled steps in one place: `plan` compiles exactly what `fit` runs."""

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax._src.config import threefry_gpu_kernel_lowering  # the context: `jax.config` sets it for all threads

from jaxgpt.batch import Batch
from jaxgpt.config.validate import short_repr
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.layers.block import Compute
from jaxgpt.lora import freeze, init_adapters, join_adapters, thaw, thawed_shapes, with_adapters
from jaxgpt.loss import ObjectiveConfig, chunked_next_token_loss
from jaxgpt.model import GPT
from jaxgpt.optim import OptimConfig
from jaxgpt.parallel.device import ComputeOptions, compute_options
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.parallel.strategy import BatchSplit, EvalFn, StepFn, Strategy, make_single, split_batch, with_shardings
from jaxgpt.train import LossFn, Params, TrainState, eval_step, init_state, train_step

# Steps and batches that the device may still compute while the host goes on. Two hide the host's work. More would only
# queue memory, and several fake devices on few cores hang when hundreds of steps are in flight.
IN_FLIGHT = 2
Devices = Sequence[jax.Device] | None  # None: of all processes. A topology has absent ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """The compiled steps of one experiment on its devices, and the shapes of their arguments."""

    options: ComputeOptions
    model: GPT  # the model, with the dtype, kernel and sharding hooks for the devices
    strategy: Strategy  # how the devices share parameters and batches
    split: BatchSplit  # how a batch is cut into micro-batches
    init_state: Callable[..., TrainState]  # (key, params to start from or None) -> the state of step 0
    train_step: StepFn  # (state, batch, key) -> (state, metrics). It donates the old state
    eval_step: EvalFn  # (params, batch) -> (summed nats, number of targets)
    objective: ObjectiveConfig  # what training minimises
    merge: Callable[[Params, Params | None], Params]  # see `merged_params`
    eval_params: Callable[[TrainState], Params] | None  # see `OptimConfig`. None means the trained ones
    abstract_state: TrainState  # shapes and shardings to restore checkpoints with
    abstract_batch: Batch  # shapes and shardings of a training batch
    __repr__ = short_repr

    def merged_params(self, state: TrainState) -> Params:
        """Return the parameters for `eval_step`: all of the model, with each adapter, if any, next to its kernel."""
        return self.merge(self.eval_params(state) if self.eval_params else state.params, state.frozen_params)

    def lower(self) -> Any:
        """Lower `train_step` for this experiment's states and batches, to be compiled by XLA."""
        jitted: Any = self.train_step
        return jitted.lower(self.abstract_state, self.abstract_batch, jax.eval_shape(jax.random.key, 0))

    def draw_by_kernel(self) -> contextlib.AbstractContextManager:
        """Let JAX's own kernel draw the bits of `init_state` on GPUs, if each device holds the whole state.

        XLA unrolls threefry for each array: 48 to 95 s of compilation for GPT-2 124M, not 4. The bits are the same. The kernel
        needs up to 24 bytes for each element of a whole array, and a step with dropout would move 44% more.
        """
        is_whole = all(x.sharding.is_fully_replicated for x in jax.tree.leaves(self.abstract_state))
        return threefry_gpu_kernel_lowering(True) if is_whole else contextlib.nullcontext()

    @property
    def parameters(self) -> tuple[int, int]:
        """Return the numbers of parameters of the model and of its adapters."""
        trained, frozen = count_parameters(self.abstract_state.params), self.abstract_state.frozen_params
        return (count_parameters(thawed_shapes(frozen)), trained) if frozen else (trained, 0)


def make_trainer(experiment: Experiment, devices: Devices = None, *, recorded: Experiment | None = None) -> Trainer:
    """Build the model, the optimiser and the compiled steps of an experiment. Its vocabulary size must be set.

    recorded: the experiment that a resumed run was started with, perhaps on other hardware. If these devices do not have
    its attention kernel, another is taken. Raises `UserError` if they do not have or fit what is asked for otherwise.
    """
    config, train, optim, lora = experiment.model, experiment.train, experiment.optim, experiment.lora
    device = devices[0] if devices else None
    required = recorded is None or train.attention != recorded.train.attention
    options = compute_options(config, train, device, is_packed=experiment.data.is_packed, required=required)
    strategy, split = choose_strategy(experiment, devices, is_resumed=recorded is not None)
    attention_fn = strategy.shard_attention(options.attention_fn)
    model = config.make_model(Compute(options.dtype, attention_fn, strategy.sharding_hooks))
    if optim.muon_dtype == "auto" and options.on_gpu and options.dtype != jnp.float32:
        optim = dataclasses.replace(optim, muon_dtype="bfloat16")
    optimizer = optim.make_optimizer(train.steps, model=config)
    init = functools.partial(init_state, model, optimizer, batch_size=strategy.data_parallel_size)
    if lora.rank is not None:
        init = functools.partial(init, adapt=lambda key, x: (init_adapters(lora, key, x), freeze(lora, x)))
    shapes = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0), None)
    if lora.rank is not None and config.is_foreign:
        _check_adapters(model, shapes.params)
    shardings = jax.tree.broadcast(strategy.state_shardings(shapes, config, optimizer), shapes)

    loss_fn, eval_fn = make_losses(experiment, model, on_gpu=options.on_gpu)
    merge = functools.partial(join_adapters, lora)
    step = functools.partial(
        train_step,
        loss_fn=loss_fn,
        optimizer=optimizer,
        schedule=optim.make_schedule(train.steps),
        grad_accum_steps=split.grad_accum_steps,
        merge=merge,
        report=experiment.optim.metrics,
    )
    adds_up = split.grad_accum_steps > 1 and not config.dropout
    eval_params = None
    if type(optim).eval_params is not OptimConfig.eval_params:
        eval_params = jax.jit(lambda state: optim.eval_params(state.opt_state, state.params))
    return Trainer(
        options=options,
        model=model,
        strategy=strategy,
        split=split,
        init_state=jax.jit(init, out_shardings=shardings),  # each array is created directly with its sharding
        train_step=strategy.jit_train_step(step, shardings, adds_up),
        eval_step=strategy.jit_eval_step(functools.partial(eval_step, loss_fn=eval_fn)),
        objective=experiment.objective,
        merge=merge,
        eval_params=eval_params,
        abstract_state=with_shardings(shapes, strategy.checkpoint_sharding or shardings),
        abstract_batch=experiment.data.shape_batch(strategy.abstract_tokens(train.batch_size, config.block_size)),
    )


def make_losses(experiment: Experiment, model: GPT, *, on_gpu: bool = False) -> tuple[LossFn, LossFn]:
    """Return the loss that training minimises, and the one that a validation measures, without label smoothing.

    on_gpu: compute in the forms of `layers.gpu`, and all logits at once as one chunk, whose gradient is no scatter.
    """
    config, objective = experiment.model, experiment.objective
    chunk, head_loss = experiment.parallel.loss_chunk or config.block_size, None
    is_plain = type(model) is GPT and type(objective).make_loss is ObjectiveConfig.make_loss
    if chunk < config.block_size or (on_gpu and is_plain):
        head_loss = functools.partial(chunked_next_token_loss, chunk=chunk)
    wraps = [] if experiment.lora.rank is None else [with_adapters]
    if on_gpu:
        from jaxgpt.layers.gpu import log_sum_exp, with_gpu_forms  # which other devices need not import

        head_loss = head_loss and functools.partial(head_loss, log_sum_exp=log_sum_exp)
        # Where logits are capped, or what comes before them is not known, they may be large.
        is_bounded = config.logit_softcap is None and not config.is_foreign
        wraps.append(functools.partial(with_gpu_forms, half_logits=is_bounded))
    make_loss = functools.partial(objective.make_loss, model, head_loss=head_loss)
    loss_fn, eval_fn = make_loss(label_smoothing=experiment.optim.label_smoothing), make_loss()
    for wrap in wraps:
        loss_fn, eval_fn = wrap(loss_fn), wrap(eval_fn)
    return loss_fn, eval_fn


def _check_adapters(model: GPT, adapters: Params) -> None:
    """Raise `UserError` for an adapter of a module that is not jaxgpt's `Dense`: nothing would add it."""
    from jaxgpt.sample.quantize import find_own_modules

    own = find_own_modules(model)
    for *names, _ in traverse_util.flatten_dict(adapters):
        if tuple(names) not in own:
            raise UserError(f"lora.targets has {'/'.join(names)}: only jaxgpt.layers.linear.Dense adds adapters")


def gather_params(trainer: Trainer, state: TrainState, merge: Callable[..., Params] | None = None) -> Params | None:
    """Gather the parameters of the model on one device. Return None if this process holds only shards of them.

    merge: joins adapters and frozen parameters, after the gathering, since one process cannot launch a program over all
    devices. None puts each adapter next to its kernel, in float32.
    """
    held, device = (state.params, state.frozen_params), jax.local_devices()[0]
    if not all(x.is_fully_addressable or x.is_fully_replicated for x in jax.tree.leaves(held)):
        return None
    held = jax.tree.map(lambda x: jax.device_put(x.addressable_data(0) if x.is_fully_replicated else x, device), held)
    return thaw(trainer.merge(*held)) if merge is None else merge(*held)


def mean_loss(eval_step: Callable, params: Params, batches: Iterable[Batch]) -> tuple[float, int]:
    """Return (nats per target, number of targets) over all batches, by the compiled `train.eval_step`.

    The sums of batches are added in float64 on the host, which stays exact enough over a million windows.
    """
    total, pending = np.zeros(2), deque[Any]()
    for batch in batches:
        pending.append(eval_step(params, batch))
        if len(pending) > IN_FLIGHT:
            total += [float(x) for x in pending.popleft()]
    for sums in pending:
        total += [float(x) for x in sums]
    nats, count = total.tolist()
    assert count, "no targets to evaluate on"
    return nats / count, int(count)


def choose_strategy(
    experiment: Experiment, devices: Devices = None, *, is_resumed: bool = False
) -> tuple[Strategy, BatchSplit]:
    """Return the strategy and the split of a batch. Raises `UserError` if they do not fit the devices.

    is_resumed: auto ignores the sizes of a mesh, which the run may have recorded on other devices.
    """
    parallel, present = experiment.parallel, devices or jax.devices()
    name = parallel.strategy
    is_one = (parallel.data, parallel.fsdp, parallel.tensor, parallel.slices) == (-1, 1, 1, 1)
    if name == "auto" and (is_one or is_resumed):
        name = "pmap" if len(present) > 1 else "single"
    elif name != "mesh" and not is_one:
        raise UserError(f"parallel.data, fsdp, tensor and slices need --parallel.strategy mesh, not {name}")
    if name == "mesh":
        from jaxgpt.parallel.mesh import make_mesh  # several devices' modules, which one device does not need

        strategy = make_mesh(present, parallel, experiment.model)
    elif name == "pmap":
        from jaxgpt.parallel.pmap import make_pmap

        strategy = make_pmap(devices)
    elif devices is None and jax.process_count() > 1:
        raise UserError("parallel.strategy=single with several processes: take pmap or mesh")
    else:
        strategy = make_single(devices)
    return strategy, split_batch(experiment.train.batch_size, strategy.data_parallel_size, parallel)


def fit_devices(experiment: Experiment) -> Experiment:
    """Return a recorded experiment, with the strategy auto if its own does not fit these devices."""
    try:
        choose_strategy(experiment, is_resumed=True)
    except UserError:
        return dataclasses.replace(experiment, parallel=dataclasses.replace(experiment.parallel, strategy="auto"))
    return experiment
