"""Change activations while the model computes, and see what becomes of its output."""

from jaxgpt.interventions.edits import Edit, add, replace, scale, zero
from jaxgpt.interventions.lens import fit_jacobian_lens, logit_lens
from jaxgpt.interventions.model import edit
from jaxgpt.interventions.plots import plot_heatmap
from jaxgpt.interventions.probes import Probe, fit_probe
from jaxgpt.interventions.forward import Forward, run, run_each, token_losses

__all__ = [
    "Edit",
    "Forward",
    "Probe",
    "add",
    "edit",
    "fit_jacobian_lens",
    "fit_probe",
    "logit_lens",
    "plot_heatmap",
    "replace",
    "run",
    "run_each",
    "scale",
    "token_losses",
    "zero",
]
