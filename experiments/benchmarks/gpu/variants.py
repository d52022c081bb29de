"""Other forms of the training step, each in turns with the step as it is."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from unittest import mock

from training import Steps, trainer_steps

from gpu.row import Row
from gpu.setting import Setting
from gpu.steps import gpt2_experiment, random_batches
from jaxgpt import loss
from jaxgpt.layers import gpu, linear, norm
from jaxgpt.parallel.trainer import make_trainer

# What the layers and the loss compute where they are not in the forms for GPUs.
OWN_FORMS = {
    "norm_by_sums": lambda x, scale, bias, eps, centred: (
        norm.layer_norm(x, scale, bias, eps) if centred else norm.rms_norm(x, scale, eps)
    ),
    "act_in_float32": lambda act, *arrays: act(*arrays),
    "float16_logits": linear.float32_logits,
    "log_sum_exp": loss.log_sum_exp,
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A step that differs: without some forms, with other options of the experiment, or with flags of XLA."""

    without: tuple[str, ...] = ()
    options: dict = dataclasses.field(default_factory=dict)
    flags: dict = dataclasses.field(default_factory=dict)


# In the order of what they are worth to know.
VARIANTS = {
    "XLA's own forms, 2 chunks": Variant(tuple(OWN_FORMS), {"loss_chunk": 2}, {"xla_gpu_dot_merger_threshold_mb": 64}),
    "products by cuBLAS only": Variant(flags={"xla_gpu_enable_triton_gemm": False}),
    "activations as they are": Variant(("act_in_float32",)),
    "logits of bfloat16": Variant(("float16_logits",)),
    "largest and sum in two passes": Variant(("log_sum_exp",)),
    "norms by XLA": Variant(("norm_by_sums",)),
    "q and k in one product": Variant(flags={"xla_gpu_dot_merger_threshold_mb": 64}),
    "logits in 8 chunks": Variant(options={"loss_chunk": 8}),
    "2 micro-batches": Variant(options={"micro_batch_size": 2}),
    "layers scanned, remat dots": Variant(options={"scan_layers": True, "remat": "dots"}),
}


def checks(setting: Setting) -> list[Callable[[], Iterator[Row]]]:
    """Return one check for each variant."""
    return [functools.partial(vary, setting, name) for name in VARIANTS]


def make_variant(setting: Setting, variant: Variant) -> Steps:
    """Compile the steps of a variant."""
    context, options = setting.contexts[0], dict(variant.options)
    if "loss_chunk" in options:  # a number of chunks here, and of tokens there
        options["loss_chunk"] = context // options["loss_chunk"]
    if "micro_batch_size" in options:  # likewise, of sequences there
        options["micro_batch_size"] = setting.tokens // context // options["micro_batch_size"]
    experiment = gpt2_experiment(setting, context, **options)
    with contextlib.ExitStack() as stack:
        for name in variant.without:
            stack.enter_context(mock.patch.object(gpu, name, OWN_FORMS[name]))
        trainer = make_trainer(experiment)
        compiled = trainer.lower().compile(compiler_options=variant.flags or None)
    return trainer_steps(dataclasses.replace(trainer, train_step=compiled), random_batches(experiment))


@functools.cache
def as_it_is(setting: Setting) -> Steps:
    """Return the steps that `fit` takes."""
    return make_variant(setting, Variant())


def vary(setting: Setting, name: str) -> Iterator[Row]:
    """Time steps of one variant in turns with steps as `fit` takes them."""
    base, other = as_it_is(setting), make_variant(setting, VARIANTS[name])
    seconds: dict[Steps, list[float]] = {base: [], other: []}
    for run in seconds:
        run(3)
    for _ in range(setting.rounds):
        for run, each in seconds.items():
            began = time.perf_counter()
            run(10)
            each.append((time.perf_counter() - began) / 10)
    ratios = [b / a for b, a in zip(seconds[base], seconds[other], strict=True)]
    beside = f"{setting.tokens / min(seconds[other]):,.0f} tokens/s at best, as it is {setting.tokens / min(seconds[base]):,.0f}"
    yield Row(what=f"train, {name}: speed over the step as it is", values=ratios, beside=beside)
