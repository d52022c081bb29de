"""Read the weights of a model that transformers saved into a model of the zoo, by a table of names.

A page that brings a family has `import_rules(config.json) -> {"config": ..., "table": [Rule(...), ...]}`. Then
python experiments/zoo/import_hf.py PAGE DIR RUN_DIR [TOKENIZER] makes a run of a model, for jaxgpt sample, evaluate, serve.
"""

import contextlib
import importlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import traverse_util

from jaxgpt import Experiment, GPTConfig
from jaxgpt.data.tokenizer import fingerprint
from jaxgpt.errors import UserError
from jaxgpt.hf.source import find_directory, keep_companions, load_named_tokenizer
from jaxgpt.hf.weights import list_tensors, summarize_names
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.directory import lock_run, write_metadata


def same(x: np.ndarray) -> np.ndarray:
    """Return a tensor as it is: a norm's scale, a bias, an embedding."""
    return x


class Rule(NamedTuple):
    """Say where one kind of tensor goes. {layer} and {expert} stand for numbers; experts are stacked in their order."""

    theirs: str  # name in the files
    ours: str | tuple[str, ...]  # path of the parameter, or of each parameter that `convert` returns
    convert: Callable[[np.ndarray], Any] = np.transpose  # their tensor, [out, in], -> our array or arrays, [in, out]

    def match(self, name: str) -> dict[str, str] | None:
        """Return the numbers in the name of a tensor of this kind; None for another kind."""
        found = re.fullmatch(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(self.theirs)), name)
        return found and found.groupdict()


def read_params(name: str, config: GPTConfig, table: Sequence[Rule], *, skip: str = "") -> dict[str, Any]:
    """Return the parameters of `config.make_model()` in float32. Raises `UserError` unless all of them are there.

    name: a directory, or an id on the Hub. skip: a regular expression for the names of tensors that are not used.
    """
    if config.scan_layers:
        raise UserError("scan_layers=True: in the files each layer has its own names; import with scan_layers=False")
    flat: Any = traverse_util.flatten_dict(config.make_model().shapes(), sep="/")
    wanted = {path: x.shape for path, x in flat.items()}
    parts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)  # path -> expert, or -1 -> its array
    unknown = []
    for theirs, tensor in list_tensors(find_directory(name)).items():
        matches = ((rule, numbers) for rule in table if (numbers := rule.match(theirs)) is not None)
        rule, numbers = next(matches, (None, {}))
        if rule is not None and not (rule.ours == "lm_head/kernel" and config.tie_embeddings):  # a copy
            arrays = rule.convert(tensor.read().astype(np.float32))
            pairs = [(rule.ours, arrays)] if isinstance(rule.ours, str) else zip(rule.ours, arrays, strict=True)
            for path, array in pairs:
                parts[path.format(**numbers)][int(numbers.get("expert", -1))] = array
        elif rule is None and not (skip and re.fullmatch(skip, theirs)):
            unknown.append(theirs)
    params = {path: part[-1] if -1 in part else np.stack([x for _, x in sorted(part.items())]) for path, part in parts.items()}  # fmt: skip
    wrong = [path for path, x in params.items() if x.shape != wanted.get(path, x.shape)]
    problems = {
        "tensors without a rule": unknown,
        "parameters without a tensor": wanted.keys() - params.keys(),
        "rules for what is no parameter": params.keys() - wanted.keys(),
        "other shapes": [f"{path} {list(params[path].shape)}, needs {list(wanted[path])}" for path in wrong],
    }
    found = [f"{problem}: {summarize_names(names)}" for problem, names in problems.items() if names]
    if found:
        raise UserError(f"{name} does not fit {type(config).__name__}: {'; '.join(found)}")
    return traverse_util.unflatten_dict({path: np.ascontiguousarray(x) for path, x in params.items()}, sep="/")


def write_run(page: Any, name: str, run_dir: str, tokenizer: str | None = None) -> None:
    """Write a model as a run. page: the module with `import_rules`. tokenizer: a tokenizer.json, or "ids" for none."""
    source, directory = find_directory(name), Path(run_dir)
    rules = page.import_rules(json.loads((source / "config.json").read_text(encoding="utf-8")))
    chosen = load_named_tokenizer(str(source / "tokenizer.json") if tokenizer is None else tokenizer, rules["config"])
    params, experiment = read_params(name, **rules), Experiment(name="imported", model=rules["config"])
    with lock_run(directory, fresh=False):
        with contextlib.closing(Checkpoints(directory / "checkpoints")) as checkpoints:
            checkpoints.save_params(params, 0)
        keep_companions(source, directory)
        about: Any = {"data": {"tokenizer_sha256": fingerprint(chosen)}, "imported": {"from": name}}
        write_metadata(directory, experiment, chosen, vocab_size=experiment.model.vocab_size, **about)


if __name__ == "__main__":
    write_run(importlib.import_module(sys.argv[1]), *sys.argv[2:])
