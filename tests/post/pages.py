"""The modules of experiments/post, imported as Python imports the modules in a program's folder."""

import importlib

import pytest

from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "experiments" / "post"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(FOLDER))
    distillation, dpo, grpo, logprobs, preferences = map(
        importlib.import_module, ("distillation", "dpo", "grpo", "logprobs", "preferences")
    )
