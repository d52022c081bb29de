"""An experiment: data, objective, adapters and hardware, with architecture, optimiser and training loop."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxgpt.config.model import GPTConfig
from jaxgpt.config.training import MAX_NEW_TOKENS as MAX_NEW_TOKENS
from jaxgpt.config.training import OptimConfig, TrainConfig
from jaxgpt.config.validate import (
    LARGEST_SIZE,
    Checked,
    Interval,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Size,
    nearest,
    short,
)
from jaxgpt.errors import UserError

if TYPE_CHECKING:
    import jax
    from flax import linen as nn

    from jaxgpt.batch import Batch
    from jaxgpt.data.pipeline import Dataset
    from jaxgpt.loss import HeadLoss
    from jaxgpt.train import LossFn

AxisSize = Annotated[int, Interval(ge=-1, le=LARGEST_SIZE)]  # size of a mesh axis. -1 means the rest of the devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
    """The data and the tokenizer.

    >>> DataConfig(path="chats.jsonl", tokenizer="byte").is_chat
    True
    """

    # built-in text: python-docs, shakespeare, sancho or quijote
    corpus: str = "python-docs"
    # your text: a UTF-8 file, a folder of .txt, .bin shards, .jsonl conversations, or a mixture a:0.7 b:0.3. None means corpus
    path: str | None = None
    tokenizer: str = "char"  # char, byte, bpe (trained on the text), ids, or the path of a tokenizer.json
    bpe_vocab_size: Annotated[int, Interval(ge=257, le=LARGEST_SIZE)] = 4096  # tokens of a BPE trained on the text
    # share of the characters of each file, or of all conversations, held out for validation: the last ones
    val_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("path", "tokenizer"):
            if getattr(self, name) == "":
                raise UserError(f"data.{name} is empty: name one, or leave the option out")

    @property
    def tokenizer_file(self) -> str | None:
        """The path of a tokenizer.json, if `tokenizer` is one, else None."""
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

        known: the fingerprint that a run to resume has recorded. The dataset should have the same. Raises `UserError`
        if there is nothing to train on.
        """
        from jaxgpt.data.dataset import prepare

        return prepare(self, block_size=model.block_size, vocab_size=model.vocab_size, known=known)

    def shape_batch(self, tokens_BT: jax.ShapeDtypeStruct) -> Batch:
        """Return the shapes of a training batch, given the shapes of its tokens."""
        import jax

        from jaxgpt.batch import Batch

        if not self.is_packed:
            return Batch(tokens_BT, tokens_BT)
        counted_BT = jax.ShapeDtypeStruct(tokens_BT.shape, bool, sharding=tokens_BT.sharding)
        return Batch(tokens_BT, tokens_BT, counted_BT, tokens_BT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Checked):
    """What training minimises: the cross-entropy of the next token. A subclass may minimise something else.

    >>> Experiment(name="mine", objective=ObjectiveConfig()).objective.unit
    'nats per token'
    """

    unit = "nats per token"  #: unit of the validation loss. A subclass that validates with something else names it

    def make_loss(self, model: nn.Module, *, head_loss: HeadLoss | None = None, label_smoothing: float = 0.0) -> LossFn:
        """Return the loss: (params, batch, key) -> (summed loss, number of targets, metrics). Arguments: `loss.make_loss`."""
        from jaxgpt.loss import make_loss

        return make_loss(model, head_loss=head_loss, label_smoothing=label_smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(Checked):
    """Low-rank adapters (arXiv:2106.09685). With a rank, only they are trained, on the weights of train.init_from.

    >>> tuned = Experiment(name="tuned", lora=LoraConfig(rank=8), train=TrainConfig(init_from="gpt2"))
    """

    rank: Size | None = None  # rank of the adapters. None means no adapters, all parameters are trained
    alpha: PositiveFloat = 16.0  # the output of an adapter is multiplied by alpha / rank
    # the matrices of a block that have an adapter: q, k, v, c_fc, c_gate, c_proj (in attention and in the MLP)
    targets: tuple[str, ...] = ("q", "v")
    # dtype of the blocks' frozen matrices in training. int8 takes a quarter of float32's memory. The matrices are
    # rounded once. Training, `sample` and merged exports all use the rounded ones (arXiv:2305.14314 uses 4 bits)
    frozen: Literal["float32", "int8"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise UserError("lora.targets is empty: name matrices that shall have adapters, such as q v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(Checked):
    """The hardware, and how the run uses it: never part of the experiment's identity.

    >>> parallel = ParallelConfig(strategy="mesh", fsdp=4, micro_batch_size=8)
    """

    # auto is single, or pmap with several devices. single is one device. pmap has a model replica per device. mesh has
    # data x fsdp x tensor devices, where fsdp and tensor shard the model
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
    # kernel of a loss in chunks. fused is a TPU kernel without logits in memory, on one device or by pmap. auto is fused where
    # the products that it repeats take less than half of the time that it saves in memory traffic. Elsewhere it is xla
    loss_kernel: Literal["auto", "xla", "fused"] = "auto"
    coordinator: str | None = None  # HOST:PORT of process 0. None means what JAX finds on a cluster, else one process
    processes: Size | None = None  # number of processes, with a coordinator. None means no coordinator
    process_id: NonNegativeInt | None = None  # number of this process, from 0. None means no coordinator
    connect_timeout: Size = 300  # seconds to wait for the other processes

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.data, self.fsdp, self.tensor)
        if 0 in sizes or sizes.count(-1) > 1:
            given = f"data={self.data}, fsdp={self.fsdp}, tensor={self.tensor}"
            raise UserError(f"{given}: needs counts of devices, at most one of them -1 (the rest)")
        given = (self.coordinator is not None, self.processes is not None, self.process_id is not None)
        if any(given) and not all(given):
            named = f"coordinator={self.coordinator}, processes={self.processes}, process_id={self.process_id}"
            raise UserError(f"{named}: give all three, or none where the cluster provides them")
        if self.processes is not None and self.process_id is not None and self.process_id >= self.processes:
            raise UserError(f"process_id={self.process_id}: needs less than processes={self.processes}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that determines the result of a run.

    >>> experiment = Experiment(name="mine", model=GPTConfig(n_layer=4))
    """

    name: str  # name of the run: letters, digits, - and _. Its directory is runs/NAME, unless --run-dir names another
    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.replace("-", "").replace("_", "").isalnum() or len(self.name.encode()) > 200:
            raise UserError(f"name={short(self.name)}: needs letters, digits, '-' and '_' only, at most 200 bytes")
        if self.lora.rank is not None and self.train.init_from is None:
            weights = "weights that are there: name them with --train.init-from"
            raise UserError(f"lora.rank={self.lora.rank} trains adapters of {weights}")
        chunk, context = self.parallel.loss_chunk, self.model.block_size
        if chunk is not None and chunk < context and context % chunk:
            near = nearest(chunk, (n for n in range(1, context + 1) if context % n == 0))
            raise UserError(f"parallel.loss_chunk={chunk} does not divide model.block_size={context}: take {near}")
        horizons, steps = self.optim.horizons, self.train.steps
        if any(later <= earlier for earlier, later in itertools.pairwise((0, *horizons, steps))):
            raise UserError(f"optim.horizons={horizons}: needs rising steps below train.steps={steps}")
