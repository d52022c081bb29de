"""Checkpoints: saved in the background by Orbax, the last and the best kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jaxgpt.errors import UserError
from jaxgpt.train import TrainState

# Two items per checkpoint, so that sampling reads the parameters and not the optimiser's twice as many numbers.
PARAMS, REST = "params", "rest"


class Checkpoints:
    """The checkpoints of one run, by step. Saving returns at once; `close` waits until all is on disk."""

    def __init__(self, directory: Path):
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        policies.LatestN(1),
                        policies.BestN(
                            n=1,
                            get_metric_fn=lambda metrics: -metrics["val_loss"],
                            keep_checkpoints_without_metrics=False,
                        ),
                    ]
                ),
                best_fn=lambda metrics: metrics["val_loss"],  # without one Orbax does not write metrics at all
                best_mode="min",
                cleanup_tmp_directories=True,  # what a killed save left behind
            ),
        )

    def save(self, state: TrainState, step: int, val_loss: float | None) -> None:
        """val_loss: of this very step, by which the best is chosen; None if it was not measured."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{
                    PARAMS: ocp.args.StandardSave(state.params),
                    REST: ocp.args.StandardSave(_rest(state)),
                }
            ),
            metrics=None if val_loss is None else {"val_loss": val_loss},
        )

    def wait(self) -> None:
        """Until every save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def last(self) -> int | None:
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step with the lowest validation loss; the last one if none was measured."""
        losses = {step: loss for step in self._manager.all_steps() if (loss := self.val_loss(step)) is not None}
        return min(losses, key=lambda step: (losses[step], -step)) if losses else self.last()

    def val_loss(self, step: int) -> float | None:
        metrics = self._manager.metrics(step)
        return None if metrics is None else metrics.get("val_loss")

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The whole state; `like` gives shapes, dtypes and places."""
        restored = self._restore(step, **{PARAMS: like.params, REST: _rest(like)})
        return TrainState(params=restored[PARAMS], **restored[REST])

    def restore_params(self, step: int, like: Any) -> Any:
        """The parameters alone."""
        return self._restore(step, **{PARAMS: like})[PARAMS]

    def _restore(self, step: int, **like: Any) -> Any:
        abstract = {name: jax.tree.map(ocp.utils.to_shape_dtype_struct, tree) for name, tree in like.items()}
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()})
        return self._manager.restore(step, args=args)


def _rest(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "opt_state": state.opt_state, "guard": state.guard}


def open_checkpoints(run: Path) -> Checkpoints:
    """Of an existing run; raises `UserError` if it has none yet."""
    directory = run / "checkpoints"
    checkpoints = Checkpoints(directory) if directory.is_dir() else None
    if checkpoints is None or checkpoints.last() is None:
        raise UserError(f"{run} has no checkpoint yet: train it with `jaxgpt train --run-dir {run}`")
    return checkpoints
