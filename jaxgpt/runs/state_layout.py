"""How checkpoints lay out a training state on disk: as version 0.1.0 did, whatever its classes are now."""

from typing import Any

from flax import struct

from jaxgpt.skip import SkipState
from jaxgpt.train import TrainState

# Two items per checkpoint, so that sampling reads the parameters and not the optimiser's twice as many numbers.
PARAMS, REST = "params", "rest"


@struct.dataclass
class _Guard:
    """The record of skipped steps, beside the optimizer's state and not around it: see `SkipState`."""

    skipped: Any
    in_row: Any
    norms: Any


def to_items(state: TrainState) -> dict[str, Any]:
    """Return what is saved of a state: all but frozen parameters."""
    s = state.opt_state
    guard = _Guard(skipped=s.skipped, in_row=s.in_a_row, norms=s.norms)
    return {PARAMS: state.params, REST: {"step": state.step, "opt_state": s.inner_state, "guard": guard}}


def from_items(items: dict[str, Any], *, spikes: float | None) -> TrainState:
    """Return the state of which these are the items. spikes: see `SkipState`."""
    rest = items[REST]
    guard: _Guard = rest["guard"]
    opt_state = SkipState(rest["opt_state"], guard.skipped, guard.in_row, guard.norms, spikes)
    return TrainState(rest["step"], items[PARAMS], opt_state)
