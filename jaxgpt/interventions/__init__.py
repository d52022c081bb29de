"""Change activations while the model computes, and see what becomes of its output."""

from jaxgpt.interventions.edits import Edit, add, replace, scale, zero
from jaxgpt.interventions.model import edit
from jaxgpt.interventions.run import Forward, run, run_each

__all__ = ["Edit", "Forward", "add", "edit", "replace", "run", "run_each", "scale", "zero"]
