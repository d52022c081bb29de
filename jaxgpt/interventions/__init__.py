"""Change activations while the model computes, and see what becomes of its output."""

from jaxgpt.interventions.analyses import (
    Ablations,
    Attribution,
    ablate_all,
    induction_scores,
    logit_attribution,
    patch,
    plot_heatmap,
    previous_token_scores,
    repeat_random_tokens,
)
from jaxgpt.interventions.edits import Edit, add, replace, scale, zero
from jaxgpt.interventions.lens import Probe, fit_jacobian_lens, fit_probe, logit_lens
from jaxgpt.interventions.model import Forward, edit, run, run_each, token_losses

__all__ = [
    "Ablations",
    "Attribution",
    "Edit",
    "Forward",
    "Probe",
    "ablate_all",
    "add",
    "edit",
    "fit_jacobian_lens",
    "fit_probe",
    "induction_scores",
    "logit_attribution",
    "logit_lens",
    "patch",
    "plot_heatmap",
    "previous_token_scores",
    "repeat_random_tokens",
    "replace",
    "run",
    "run_each",
    "scale",
    "token_losses",
    "zero",
]
