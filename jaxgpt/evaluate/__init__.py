"""How good a run is: its loss on text, and its answers to tasks from local files."""

from jaxgpt.evaluate.text import evaluate_run, mean_loss

__all__ = ["evaluate_run", "mean_loss"]
