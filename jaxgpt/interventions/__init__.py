"""Change activations while the model computes, and see how its output changes."""

from jaxgpt.interventions.analyses import Ablations as Ablations
from jaxgpt.interventions.analyses import ablate_all as ablate_all
from jaxgpt.interventions.analyses import logit_lens as logit_lens
from jaxgpt.interventions.analyses import patch as patch
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
