"""Evaluate a run on the tasks of lm-evaluation-harness (`pip install "jaxgpt[eval]"`).

The harness finds only its own models by name, so start its command line from this module, which adds `jaxgpt`::

    python -m jaxgpt.tools.evaluate.lm_eval_model --model_args run=runs/mine,weights=int8 --tasks lambada_openai

From Python, pass an instance::

    from jaxgpt.tools.evaluate.lm_eval_model import JaxGPT
    results = lm_eval.simple_evaluate(model=JaxGPT(run="runs/mine"), tasks=["lambada_openai"])

Only `tasks.py` imports this module.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.run import Run, load
from jaxgpt.sample import FILTERS, Precision
from jaxgpt.sample.score import pair_ids

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as e:
    message = f"lm-evaluation-harness is needed ({e}): python -m pip install 'jaxgpt[eval]'"
    if __name__ == "__main__":
        sys.stderr.write(f"jaxgpt: {message}\n")
        raise SystemExit(2) from None
    raise ImportError(message) from None

MAX_NEW_TOKENS = 256  # the harness's own default
# The names in tasks for the maximum number of tokens to generate. The harness reads the first that is given.
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("jaxgpt")
class JaxGPT(LM):
    """A run as a model of the harness, on one device, in one process.

    Its methods raise `UserError` for texts that the run's tokenizer cannot encode.
    """

    def __init__(
        self,
        run: Run | str | Path | None = None,
        *,
        weights: Precision | None = None,
        batch_size: int | str | None = None,
        **ignored: Any,
    ):
        """Load a run.

        Args:
            run: a run, or its directory. None means the newest under `runs/`.
            weights: see `Run.for_decoding`.
            batch_size: texts that are scored or generated together. None or "auto" means the batch size of training.
            ignored: options such as device, which the harness passes to every model.

        Raises:
            UserError: if there is no such run, or batch_size is not valid.
        """
        super().__init__()
        run = run if isinstance(run, Run) else load(run)
        self.run = run if weights is None else run.for_decoding(weights)
        if batch_size is None or str(batch_size).startswith("auto"):
            batch_size = self.run.experiment.train.batch_size
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise UserError(f"batch_size={batch_size!r}: needs a whole number of at least 1, or auto")
        self.batch_size = int(batch_size)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-probability, is it greedy?) of each continuation. A request has (context, continuation)."""
        pairs = [pair_ids(self.run.tokenizer, *request.args) for request in requests]
        return [tuple(found) for found in self.run.loglikelihood(pairs, batch_size=self.batch_size)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in the harness's disjoint windows. A request has (text,)."""
        windows = []  # (index of the request, pair)
        for number, request in enumerate(requests):
            first, ids = pair_ids(self.run.tokenizer, "", *request.args)
            rolling = get_rolling_token_windows(ids, first[-1], self.run.model.config.block_size, 1)
            (_, begins), *others = map(make_disjoint_window, rolling)
            windows += [(number, pair) for pair in [(first, begins), *others]]
        found = self.run.loglikelihood([pair for _, pair in windows], batch_size=self.batch_size)
        totals = [0.0] * len(requests)
        for (number, _), likelihood in zip(windows, found, strict=True):
            totals[number] += likelihood.logprob
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation of each context, up to a stop string. A request has (context, options)."""
        groups: dict[str, list[int]] = {}  # options: indices of the requests that have them
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts: dict[int, str] = {}
        for options, numbers in groups.items():
            for first in range(0, len(numbers), self.batch_size):
                batch = numbers[first : first + self.batch_size]
                prompts = [requests[number].args[0] for number in batch]
                texts |= zip(batch, self.run.sample(prompts, **sampling_options(json.loads(options))), strict=True)
        return [texts[number] for number in range(len(requests))]


def sampling_options(options: dict[str, Any]) -> dict[str, Any]:
    """Translate a task's generation_kwargs to options of `Run.sample`. The default is greedy decoding.

    Raises `UserError` for options without a counterpart, since ignoring them would change the text.
    """
    options = dict(options)
    until = options.pop("until", None) or []
    limits = [options.pop(name, None) for name in LIMITS]
    do_sample = options.pop("do_sample", bool(options.get("temperature")))
    filters = {name: options.pop(name) for name in FILTERS if name in options}
    if options:
        raise UserError(
            f"the task's generation_kwargs has {', '.join(options)}, which is not supported: "
            f"use only until, do_sample, {', '.join((*LIMITS, *FILTERS))}"
        )
    return {
        "max_new_tokens": next((limit for limit in limits if limit is not None), MAX_NEW_TOKENS),
        "stop": [stop for stop in ([until] if isinstance(until, str) else until) if stop],
        **(filters if do_sample else {"greedy": True}),
    }


def main() -> None:
    """Run lm_eval's own command line, with `jaxgpt` as the model unless another is named."""
    from lm_eval.__main__ import cli_evaluate

    if sys.argv[1:2] != ["ls"] and not any(word.split("=")[0] in ("--model", "-M") for word in sys.argv):
        sys.argv += ["--model", "jaxgpt"]
    try:
        configure_jax()
        cli_evaluate()
    except UserError as e:
        sys.stderr.write(f"jaxgpt: {e}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
