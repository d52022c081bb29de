"""Change activations while the model computes, and see what becomes of its output."""

from jaxgpt.interventions.ablation import Ablations, ablate_all
from jaxgpt.interventions.attribution import Attribution, logit_attribution
from jaxgpt.interventions.edits import Edit, add, replace, scale, zero
from jaxgpt.interventions.forward import Forward, run, run_each, token_losses
from jaxgpt.interventions.lens import fit_jacobian_lens, logit_lens
from jaxgpt.interventions.model import edit
from jaxgpt.interventions.patching import patch
from jaxgpt.interventions.plots import plot_heatmap
from jaxgpt.interventions.probes import Probe, fit_probe
from jaxgpt.interventions.scores import induction_scores, previous_token_scores, repeat_random_tokens

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
