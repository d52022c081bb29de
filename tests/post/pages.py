"""The modules of experiments/post, which are imported as Python imports what lies beside a program."""

import importlib

import pytest

from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "experiments" / "post"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(FOLDER))
    distillation, dpo, grpo, logprobs, preferences = map(
        importlib.import_module, ("distillation", "dpo", "grpo", "logprobs", "preferences")
    )
