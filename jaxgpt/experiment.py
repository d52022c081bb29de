"""An experiment: everything that determines the result of a run, and the hardware that computes it.

One default, one place: nothing else in the package has a fallback for a field. The comment of a field is its help text
on the command line. Architecture, data, optimiser, objective and adapters lie beside what they build.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated, Literal

from jaxgpt.config.serialize import Checked
from jaxgpt.config.validate import LARGEST_SIZE, Interval, NonNegativeFloat, NonNegativeInt, PositiveInt, Size, short
from jaxgpt.data.dataset import DataConfig
from jaxgpt.errors import UserError
from jaxgpt.lora import LoraConfig
from jaxgpt.loss import ObjectiveConfig
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.sample import MAX_NEW_TOKENS

CONTEXT_OF_WEIGHTS = LARGEST_SIZE  # as block_size: longer than any weights have, so that theirs is taken
AxisSize = Annotated[int, Interval(ge=-1, le=LARGEST_SIZE)]  # size of a mesh axis. -1 means the rest of the devices


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
    attention: Literal["auto", "plain", "native", "cudnn", "splash"] = "auto"
    log_every: PositiveInt = 10  # steps between lines of metrics.jsonl
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(Checked):
    """The hardware, and how the run uses it: never part of the experiment's identity.

    >>> parallel = ParallelConfig(strategy="mesh", fsdp=4, micro_batch_size=8)
    """

    # auto is single, or pmap with several devices, and reads no size of a mesh. single is one device. pmap has a model
    # replica per device. mesh has data x fsdp x tensor devices, where fsdp and tensor shard the model
    strategy: Literal["auto", "single", "pmap", "mesh"] = "auto"
    data: AxisSize = -1  # mesh: groups of devices that share the batch, each with a full model. -1 means the rest
    fsdp: AxisSize = 1  # mesh: devices that shard batch, parameters and optimiser state. -1 means the rest
    tensor: AxisSize = 1  # mesh: devices that shard heads, hidden units of the MLP and vocabulary. -1 means the rest
    # mesh: groups of devices between which the network is slow (TPU slices, GPU hosts). Only data extends over several
    slices: Size = 1
    # most sequences at once on a device. The rest of its share is accumulated. None means all
    micro_batch_size: PositiveInt | None = None
    # tokens of each sequence whose logits are in memory at once. None means all of block_size
    loss_chunk: PositiveInt | None = None
    coordinator: str | None = None  # HOST:PORT of process 0. None means what JAX finds on a cluster, else one process
    processes: Size | None = None  # number of processes, with a coordinator. None means no coordinator
    process_id: NonNegativeInt | None = None  # number of this process, from 0. None means no coordinator
    connect_timeout: Size = 300  # seconds to wait for the other processes

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.data, self.fsdp, self.tensor)
        if 0 in sizes or sizes.count(-1) > 1:
            raise UserError(f"data, fsdp, tensor = {sizes}: need counts of devices, at most one of them -1 (the rest)")
        given = (self.coordinator, self.processes, self.process_id)
        if 0 < given.count(None) < len(given):
            needs = "give all three, or none where the cluster provides them"
            raise UserError(f"coordinator, processes, process_id = {given}: {needs}")
        if (self.process_id or 0) >= (self.processes or 1):
            raise UserError(f"process_id={self.process_id}: needs less than processes={self.processes}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that determines the result of a run.

    >>> experiment = Experiment(name="mine", model=GPTConfig(n_layer=4))
    """

    name: str  # name of the run: letters, digits, - and _. Its directory is runs/NAME, unless --run-dir names another
    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)  # the architecture
    data: DataConfig = dataclasses.field(default_factory=DataConfig)  # text and tokenizer
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)  # optimiser, schedule
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)  # the loss
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)  # steps, batches
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)  # adapters to train alone
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)  # devices

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.replace("-", "").replace("_", "").isalnum() or len(self.name.encode()) > 200:
            raise UserError(f"name={short(self.name)}: needs letters, digits, '-' and '_' only, at most 200 bytes")
        if self.lora.rank is not None and self.train.init_from is None:
            raise UserError("lora.rank trains adapters of weights that are there: name them with --train.init-from")
        chunk, context = self.parallel.loss_chunk, self.model.block_size
        if chunk is not None and chunk < context and context % chunk:
            raise UserError(f"parallel.loss_chunk={chunk} does not divide model.block_size={context}: take a divisor")
        horizons, steps = self.optim.horizons, self.train.steps
        if any(later <= earlier for earlier, later in itertools.pairwise((0, *horizons, steps))):
            raise UserError(f"optim.horizons={horizons}: needs rising steps below train.steps={steps}")
