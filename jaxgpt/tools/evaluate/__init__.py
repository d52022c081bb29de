"""How good a run is: its loss on text, and its answers to questions from local files."""

from jaxgpt.tools.evaluate.questions import read_questions
from jaxgpt.tools.evaluate.tasks import evaluate_task, task_table
from jaxgpt.tools.evaluate.text import evaluate_run, text_table
from jaxgpt.train import mean_loss

__all__ = ["evaluate_run", "evaluate_task", "mean_loss", "read_questions", "task_table", "text_table"]
