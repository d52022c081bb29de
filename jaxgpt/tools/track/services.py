"""The services that metrics are sent to, one class each: `write` a step's values, `flush`, `close`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxgpt.errors import UserError, first_line

FOLDER = "tensorboard"  # of the run directory: `tensorboard --logdir runs` finds it


class Service(Protocol):
    """Interface of the services."""

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Send the values of a step. time: seconds since 1970, when it was taken."""
        ...

    def flush(self) -> None:
        """Write what was sent."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class TensorBoard:
    """Event files in `RUN/tensorboard`, which are written anew."""

    def __init__(self, directory: Path, config: Mapping[str, Any]):
        """Delete the event files of earlier calls. config: hyperparameters, by name."""
        try:
            from tensorboardX import SummaryWriter
            from tensorboardX.summary import hparams
        except ImportError:
            raise _missing("tensorboardX", "'jaxgpt[tensorboard]'") from None
        for old in (directory / FOLDER).glob("events.out.tfevents.*"):
            old.unlink()
        # purge_step: a TensorBoard that has read the deleted files forgets their points.
        self._writer = SummaryWriter(str(directory / FOLDER), purge_step=0)
        events = self._writer.file_writer
        assert events is not None
        for summary in hparams(dict(config), {"loss": 0.0, "val_loss": 0.0}):
            events.add_summary(summary)  # add_hparams would make a second run of them

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Add a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def flush(self) -> None:
        """Write the queued events."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases. The step is a value like others: W&B drops what is logged below its own step."""

    def __init__(self, config: Mapping[str, Any], *, project: str, name: str, key: str):
        """Create a run, or continue that of an earlier call. key: the run's id.

        Its files are where W&B puts them, ./wandb, not in the run directory: their links lead out of it.
        """
        try:
            import wandb
        except ImportError:
            raise _missing("wandb", "wandb") from None
        # This process does not train: its console, processor and memory are not those of the run.
        settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True)
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=key,
                resume="allow",
                config=dict(config),
                settings=settings,
            )
        except wandb.Error as e:  # no account, or no network
            raise UserError(f"W&B: {first_line(e).rstrip('.')}; or set WANDB_MODE=offline") from None
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log the values of a step."""
        self._run.log({**values, "step": step})

    def flush(self) -> None:
        """Do nothing: W&B sends in the background."""

    def close(self) -> None:
        """Wait until all is sent."""
        self._run.finish()


class Trackio:
    """A run of trackio, in its database on this machine or where its environment variables say."""

    def __init__(self, config: Mapping[str, Any], *, project: str, name: str, key: str):
        """Create a run, or continue that of an earlier call. key: makes its name unique."""
        try:
            import trackio
        except ImportError:
            raise _missing("trackio", "trackio") from None
        self._run = trackio.init(
            project=project,
            name=f"{name}-{key}",
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # this process does not train
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log the values of a step."""
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Do nothing: trackio sends in the background."""

    def close(self) -> None:
        """Wait until all is sent."""
        self._run.finish()


def _missing(package: str, requirement: str) -> UserError:
    return UserError(f"this needs the {package} package: python -m pip install {requirement}")
