"""An experiment: architecture, data, optimiser, training loop, hardware."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxgpt.config.model import GPTConfig
from jaxgpt.config.validate import (
    LARGEST_SIZE,
    Fraction,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Size,
    check_fields,
    nearest,
    short,
)
from jaxgpt.errors import UserError

if TYPE_CHECKING:
    import jax
    import optax
    from flax import linen as nn

    from jaxgpt.batch import Batch
    from jaxgpt.data.pipeline import Dataset
    from jaxgpt.loss import HeadLoss
    from jaxgpt.train import LossFn

MAX_NEW_TOKENS = 400  # default length of a sample
AxisSize = Annotated[int, Interval(ge=-1, le=LARGEST_SIZE)]  # of a mesh; -1: the rest of the devices
# A decay that float32 rounds to 1 would make the optimiser divide by 0.
Decay = Annotated[float, Interval(ge=0, lt=0.999999)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data and the tokenizer."""

    # built-in text: python-docs, shakespeare, sancho, quijote, or python-docs.jsonl (conversations)
    corpus: str = "python-docs"
    # your text: a UTF-8 file, a folder of .txt files, .bin token shards, or conversations (.jsonl); None: data.corpus
    path: str | None = None
    tokenizer: str = "char"  # char, byte, bpe (trained on the text), ids, or the path of a tokenizer.json
    bpe_vocab_size: Annotated[int, Interval(ge=257, le=LARGEST_SIZE)] = 4096  # tokens of a BPE trained on the text
    # share of the characters of each file, or of conversations, held out for validation: the last ones
    val_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.1

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)
        for name in ("path", "tokenizer"):
            if getattr(self, name) == "":
                raise UserError(f"data.{name} is empty: name one, or leave the option out")

    @property
    def tokenizer_file(self) -> str | None:
        """The path of a tokenizer.json, if `tokenizer` is one; else None."""
        return None if self.tokenizer in ("char", "byte", "bpe", "ids") else self.tokenizer

    @property
    def is_chat(self) -> bool:
        """Return whether each line is a conversation, a JSON object with a list of "messages"."""
        return (self.path or self.corpus).endswith(".jsonl")

    @property
    def is_packed(self) -> bool:
        """Return whether rows hold several documents, with only parts of them as targets."""
        return self.is_chat

    def open_dataset(self, model: GPTConfig, *, known: dict[str, Any] | None = None) -> Dataset:
        """Return the dataset on which a model is trained.

        known: fingerprint of the dataset of the run to resume, which this one should have. Raises `UserError` if there
        is nothing to train on.
        """
        from jaxgpt.data.dataset import prepare

        return prepare(self, block_size=model.block_size, vocab_size=model.vocab_size, known=known)

    def shape_batch(self, tokens_BT: jax.ShapeDtypeStruct) -> Batch:
        """Return the shapes of a training batch, given those of its tokens."""
        import jax

        from jaxgpt.batch import Batch

        if not self.is_packed:
            return Batch(tokens_BT, tokens_BT)
        counted_BT = jax.ShapeDtypeStruct(tokens_BT.shape, bool, sharding=tokens_BT.sharding)
        return Batch(tokens_BT, tokens_BT, counted_BT, tokens_BT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: the blocks' matrices by Muon (Jordan 2024), the rest by AdamW
    learning_rate: PositiveFloat = 1e-3  # peak learning rate of AdamW
    muon_learning_rate: PositiveFloat = 0.02  # peak learning rate of Muon
    # after warm-up; wsd: constant, then linear to the minimum (arXiv:2405.18392); inverse_sqrt: as in 2017, no minimum
    schedule: Literal["cosine", "wsd", "inverse_sqrt", "constant"] = "cosine"
    warmup_steps: NonNegativeInt | None = None  # linear from 0; None: train.steps / 10, at most 100
    # earlier train.steps of a run that was extended: the steps up to each follow the schedule that ends there
    horizons: tuple[int, ...] = ()
    decay_fraction: Annotated[float, Interval(gt=0, le=1)] = 0.2  # share of the steps in which wsd decays
    min_lr_ratio: Annotated[float, Interval(ge=0, le=1)] = 0.1  # final learning rate / peak
    beta1: Decay = 0.9  # decay of AdamW's first moment
    beta2: Decay = 0.99  # decay of AdamW's second moment
    eps: PositiveFloat = 1e-8  # added to AdamW's denominator
    weight_decay: NonNegativeFloat = 0.1  # of matrices only, multiplied by the learning rate
    momentum: Decay = 0.95  # of Muon
    grad_clip: PositiveFloat | None = 1.0  # largest global norm of the gradients; None: no clipping
    # skip a step whose gradient norm exceeds this many times the median of the last 128; None: skip no finite one
    skip_spikes: Annotated[float, Interval(gt=1)] | None = None
    label_smoothing: Fraction = 0.0  # share of each target spread over all tokens, in training only (arXiv:1512.00567)
    max_skipped: PositiveInt = 10  # steps skipped in a row, as spikes or as not finite, that end the run

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)
        for name in ("learning_rate", "muon_learning_rate")[: 1 + (self.name == "muon")]:
            decayed = self.weight_decay * getattr(self, name)
            if decayed > 1.0:  # else it makes matrices grow, from step to step
                raise UserError(
                    f"weight_decay={self.weight_decay} times {name}={getattr(self, name)} is {decayed:g}: needs at most 1, "
                    "which takes all of a matrix off in one step"
                )

    def make_optimizer(self, steps: int, *, width_ratio: float = 1.0) -> optax.GradientTransformation:
        """Return the optimizer of a run of `steps` steps. width_ratio: that of the model, see `GPTConfig`."""
        from jaxgpt.optim import make_optimizer  # a configuration is read without JAX

        return make_optimizer(self, steps, width_ratio=width_ratio)

    def make_schedule(self, steps: int) -> optax.Schedule:
        """Return the optimizer's learning rate by the number of steps taken."""
        from jaxgpt.optim import learning_rate

        return learning_rate(self, steps)

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of `steps` steps."""
        return min(100, (*self.horizons, steps)[0] // 10) if self.warmup_steps is None else self.warmup_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What training minimises: the cross-entropy of the next token. A subclass may have another one, and options."""

    def make_loss(self, model: nn.Module, *, head_loss: HeadLoss | None = None, label_smoothing: float = 0.0) -> LossFn:
        """Return the loss: (params, batch, key) -> (summed loss, number of targets, metrics). Arguments: `loss.make_loss`."""
        from jaxgpt.loss import make_loss

        return make_loss(model, head_loss=head_loss, label_smoothing=label_smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop. A step is one optimiser step, whatever the devices and the accumulation."""

    steps: Annotated[int, Interval(ge=1, le=2**40)] = 1000  # optimiser steps
    batch_size: Size = 32  # sequences per optimiser step, over all devices and micro-batches
    seed: Annotated[int, Interval(ge=0, lt=2**32)] = 0  # seed of weights, data order and dropout
    # run, or directory or Hub id of a model: start from its weights, tokenizer and architecture, but for dropout,
    # remat, scan_layers and a shorter block_size; None: random weights
    init_from: str | None = None
    # dtype of activations; auto: float32 on CPU, bfloat16 on GPU and TPU
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # attention kernel; auto: splash on TPU, cudnn on Nvidia GPUs, where shape and dropout allow, else plain
    attention: Literal["auto", "plain", "xla", "cudnn", "splash"] = "auto"
    log_every: PositiveInt = 10  # steps between lines of metrics.jsonl
    eval_every: PositiveInt = 250  # steps between validations; the last step has one too
    eval_tokens: PositiveInt | None = None  # validation tokens per evaluation, spread evenly; None: the whole split
    checkpoint_every: PositiveInt = 1000  # steps between checkpoints; the best validation and the end are kept as well
    keep_last: PositiveInt = 2  # newest checkpoints kept besides the best; the second is read if the first is damaged
    keep_every: PositiveInt | None = None  # checkpoints at multiples of this many steps are never deleted; None: none
    sample_prompt: str = ""  # prompt of the sample at the end; empty: the tokenizer's start token
    sample_tokens: Annotated[int, Interval(ge=0, le=LARGEST_SIZE)] = MAX_NEW_TOKENS  # tokens of the sample at the end
    sample_temperature: NonNegativeFloat = 0.8  # temperature of the sample at the end

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)
        if self.init_from == "":
            raise UserError("train.init_from is empty: name a run or a model, or leave the option out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685). With a rank, only they are trained, on the weights of train.init_from."""

    rank: Size | None = None  # rank of the adapters; None: no adapters, all parameters are trained
    alpha: PositiveFloat = 16.0  # an adapter's output is multiplied by alpha / rank
    # matrices of a block with an adapter: q, k, v, c_fc, c_gate, c_proj (of attention and of the MLP)
    targets: tuple[str, ...] = ("q", "v")
    # how the frozen matrices of the blocks are kept in training; int8: a quarter of float32's memory, rounded once, and
    # the adapters learn on the rounded ones, which `sample` and `export` use as well (arXiv:2305.14314 has 4 bits)
    frozen: Literal["float32", "int8"] = "float32"

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)
        if not self.targets:
            raise UserError("lora.targets is empty: name matrices that shall have adapters, such as q v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The hardware, and how the run uses it: never part of the experiment's identity."""

    # auto: single, or pmap with several devices; single: one device; pmap: a model replica per device; mesh: data x
    # fsdp x tensor devices, where fsdp and tensor shard the model
    strategy: Literal["auto", "single", "pmap", "mesh"] = "auto"
    data: AxisSize = -1  # mesh devices that share the batch, each group of them with a full model; -1: the rest
    fsdp: AxisSize = 1  # mesh devices that shard batch, parameters and optimiser state; -1: the rest
    tensor: AxisSize = 1  # mesh devices that shard the heads, the MLP's hidden units and the vocabulary; -1: the rest
    # mesh groups of devices between which the network is slow (TPU slices, GPU hosts); only data extends over several
    slices: Size = 1
    # most sequences at once on a device; the rest of its share is accumulated; None: all
    micro_batch_size: PositiveInt | None = None
    # tokens of each sequence whose logits are in memory at once; None: all of block_size
    loss_chunk: PositiveInt | None = None
    # of a loss in chunks; fused: a TPU kernel without logits in memory, on one device or by pmap; auto: fused where the
    # products that it repeats take less time than the logits' traffic, else xla
    loss_kernel: Literal["auto", "xla", "fused"] = "auto"
    coordinator: str | None = None  # HOST:PORT of process 0; None: as JAX finds it on a cluster, else a single process
    processes: Size | None = None  # number of processes, with a coordinator; None: without one
    process_id: NonNegativeInt | None = None  # number of this process, from 0, with a coordinator; None: without one
    connect_timeout: PositiveInt = 300  # seconds to wait for the other processes
    # seconds without progress (or the time of 20 steps, if longer) after which several processes count as stuck and are
    # ended; 0: never. A single process is never ended
    watchdog: NonNegativeFloat = 60.0
    # steps between comparisons of the replicas of the state on different devices; None: only before a checkpoint
    check_replicas_every: PositiveInt | None = 100

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)
        sizes = (self.data, self.fsdp, self.tensor)
        if 0 in sizes or sizes.count(-1) > 1:
            raise UserError(
                f"data={self.data}, fsdp={self.fsdp}, tensor={self.tensor}: needs counts of devices, at most one of them -1 (the rest)"
            )
        given = (self.coordinator is not None, self.processes is not None, self.process_id is not None)
        if any(given) and not all(given):
            raise UserError(
                f"coordinator={self.coordinator}, processes={self.processes}, process_id={self.process_id}: give all three, or none where the cluster provides them"
            )
        if self.processes is not None and self.process_id is not None and self.process_id >= self.processes:
            raise UserError(f"process_id={self.process_id}: needs less than processes={self.processes}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that determines the result of a run."""

    name: str  # letters, digits, - and _; names the run's directory, runs/NAME, unless --run-dir does
    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)
        if not self.name.replace("-", "").replace("_", "").isalnum() or len(self.name.encode()) > 200:
            raise UserError(
                f"name={short(self.name)}: it names a directory, so letters, digits, '-' and '_' only, at most 200 bytes"
            )
        if self.lora.rank is not None and self.train.init_from is None:
            raise UserError(
                f"lora.rank={self.lora.rank} trains adapters of weights that are there: name them with --train.init-from"
            )
        chunk, context = self.parallel.loss_chunk, self.model.block_size
        if chunk is not None and chunk < context and context % chunk:
            near = nearest(chunk, (n for n in range(1, context + 1) if context % n == 0))
            raise UserError(f"parallel.loss_chunk={chunk} does not divide model.block_size={context}: take {near}")
        ends = (0, *self.optim.horizons, self.train.steps)
        if any(later <= earlier for earlier, later in itertools.pairwise(ends)):
            raise UserError(
                f"optim.horizons={self.optim.horizons}: needs rising numbers of steps below train.steps={self.train.steps}"
            )
        if self.optim.warmup_steps is not None and self.optim.warmup_steps > self.train.steps:
            raise UserError(
                f"optim.warmup_steps={self.optim.warmup_steps} exceeds train.steps={self.train.steps}: the peak would never be reached"
            )
