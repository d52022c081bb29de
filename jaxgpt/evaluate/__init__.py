"""How good a run is: its loss on text, and its answers to questions from local files."""

from jaxgpt.evaluate.questions import read_questions
from jaxgpt.evaluate.tasks import evaluate_task, task_table
from jaxgpt.evaluate.text import evaluate_run, mean_loss, text_table

__all__ = ["evaluate_run", "evaluate_task", "mean_loss", "read_questions", "task_table", "text_table"]
