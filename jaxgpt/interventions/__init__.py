"""Change activations while the model computes, and see how its output changes."""

from jaxgpt.interventions.analyses import Ablations as Ablations
from jaxgpt.interventions.analyses import Attribution as Attribution
from jaxgpt.interventions.analyses import Probe as Probe
from jaxgpt.interventions.analyses import ablate_all as ablate_all
from jaxgpt.interventions.analyses import fit_jacobian_lens as fit_jacobian_lens
from jaxgpt.interventions.analyses import fit_probe as fit_probe
from jaxgpt.interventions.analyses import induction_scores as induction_scores
from jaxgpt.interventions.analyses import logit_attribution as logit_attribution
from jaxgpt.interventions.analyses import logit_lens as logit_lens
from jaxgpt.interventions.analyses import patch as patch
from jaxgpt.interventions.analyses import plot_heatmap as plot_heatmap
from jaxgpt.interventions.analyses import previous_token_scores as previous_token_scores
from jaxgpt.interventions.analyses import repeat_random_tokens as repeat_random_tokens
from jaxgpt.interventions.model import Edit as Edit
from jaxgpt.interventions.model import Forward as Forward
from jaxgpt.interventions.model import add as add
from jaxgpt.interventions.model import edit as edit
from jaxgpt.interventions.model import replace as replace
from jaxgpt.interventions.model import run as run
from jaxgpt.interventions.model import run_each as run_each
from jaxgpt.interventions.model import scale as scale
from jaxgpt.interventions.model import token_losses as token_losses
from jaxgpt.interventions.model import zero as zero
