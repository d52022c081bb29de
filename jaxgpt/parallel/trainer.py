"""An experiment's step on its devices, put together in one place: what `fit` runs is what `plan` compiles."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxgpt.batch import Batch
from jaxgpt.config import Experiment
from jaxgpt.model import GPT
from jaxgpt.optim import learning_rate, make_optimizer
from jaxgpt.parallel.choose import choose_layout
from jaxgpt.parallel.device import ComputeOptions, compute_options
from jaxgpt.parallel.flops import count_parameters
from jaxgpt.parallel.strategy import Share, Strategy
from jaxgpt.train import eval_step, train_step, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    options: ComputeOptions
    model: GPT  # with the dtype, the kernel and the spread of its devices
    strategy: Strategy
    shares: Share
    step: Any  # `train_step(state, batch, key)`, compiled by the strategy
    evaluate: Any  # `eval_step(params, batch)`, likewise
    whole: Any  # state -> the parameters that `evaluate` takes
    batch: Batch  # shapes and places of a training batch
    instead: str | None = None  # how the strategy differs from the recorded one, in words; None: it does not

    def lowered(self) -> Any:
        """`step` for the states and batches of this experiment, before XLA compiles it."""
        return self.step.lower(self.strategy.state, self.batch, jax.eval_shape(lambda: jax.random.key(0)))

    @property
    def parameters(self) -> tuple[int, int]:
        """(of the model, in adapters)."""
        state = self.strategy.state
        if state.base is None:
            return count_parameters(state.params), 0
        return count_parameters(state.base), count_parameters(state.params)


def make_trainer(
    experiment: Experiment, devices: Sequence[jax.Device] | None = None, *, recorded: Experiment | None = None
) -> Trainer:
    """experiment: with the size of its vocabulary. devices: as for `choose_strategy`.

    recorded: the experiment of a run that is resumed, perhaps on other hardware: a kernel or a strategy that is still the
        recorded one gives way to what these devices can do. None: a new run.
    Raises `UserError` for sizes that do not divide over the devices, and for what they cannot do.
    """
    train, parallel = experiment.train, experiment.parallel
    device = None if devices is None else devices[0]
    required = recorded is None or train.attention != recorded.train.attention
    options = compute_options(experiment.model, train, device, packed=experiment.data.is_packed, required=required)
    model = GPT(experiment.model, **options.for_model())
    optimizer = make_optimizer(experiment.optim, train.steps)
    strategy, shares, instead = choose_layout(experiment, model, optimizer, devices, recorded=recorded)
    model = model.clone(spread=strategy.spread)
    step = functools.partial(
        train_step,
        model=model,
        optimizer=optimizer,
        schedule=learning_rate(experiment.optim, train.steps),
        lora=experiment.lora,
        accumulation=shares.accumulation,
        loss_chunk=parallel.loss_chunk,
        label_smoothing=experiment.optim.label_smoothing,
        skip_spikes=experiment.optim.skip_spikes,
    )
    evaluate = functools.partial(eval_step, model=model, loss_chunk=parallel.loss_chunk)
    together = functools.partial(whole, lora=experiment.lora)
    batch = strategy.batch(train.batch_size, experiment.model.block_size)
    if experiment.data.is_packed:
        counted = jax.ShapeDtypeStruct(batch.inputs_BT.shape, bool, sharding=batch.inputs_BT.sharding)
        batch = batch._replace(mask_BT=counted, segments_BT=batch.inputs_BT)
    if experiment.model.n_encoder_layer:
        batch = batch._replace(source_BS=batch.inputs_BT, source_segments_BS=batch.inputs_BT)
    return Trainer(
        options=options,
        model=model,
        strategy=strategy,
        shares=shares,
        step=strategy.step(step),
        evaluate=strategy.evaluate(evaluate),
        whole=together if experiment.lora.rank is None else jax.jit(together),
        batch=batch,
        instead=instead,
    )
