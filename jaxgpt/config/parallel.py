"""The devices and processes of a run."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from jaxgpt.config.validate import (
    LARGEST_SIZE,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Size,
    check_fields,
)
from jaxgpt.errors import UserError

AxisSize = Annotated[int, Interval(ge=-1, le=LARGEST_SIZE)]  # of a mesh; -1: the rest of the devices


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
