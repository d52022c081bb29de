"""Run in a process with JAX_NUM_CPU_DEVICES=4: a run left half-way and gone on with, bit for bit. See test_resume.py."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np

from jaxgpt.config import ParallelConfig
from jaxgpt.fitting import fit
from jaxgpt.run import load
from jaxgpt.runs.metrics import MetricsFile, read_metrics
from tests.helpers import tiny_experiment

STRATEGIES = {
    "accumulation": ParallelConfig(strategy="single", micro_batch_size=2),
    "pmap, in pieces": ParallelConfig(strategy="pmap", micro_batch_size=1),
    "mesh, in pieces": ParallelConfig(strategy="mesh", data=2, fsdp=2, micro_batch_size=1),
}


class Left(BaseException):
    """Leaves the loop as a kill would: with no farewell save."""


def lines(directory: Path) -> list[tuple]:
    keys = ("step", "loss", "grad_norm", "learning_rate", "val_loss")
    return [tuple(line.get(k) for k in keys) for line in read_metrics(directory / "metrics.jsonl")]


def resumed(name: str, text: Path, root: Path) -> dict:
    """What differs between a run and the same one that was left after step 3 of 6, its checkpoint being of step 2."""
    plain = tiny_experiment(text, batch_size=8)
    model = dataclasses.replace(plain.model, n_layer=1, n_head=2, dropout=0.2, vocab_size=32)
    experiment = dataclasses.replace(plain, model=model, parallel=STRATEGIES[name])
    whole, again = root / "whole", root / "again"
    fit(experiment, whole, progress=False)

    write = MetricsFile.write

    def leave(self: MetricsFile, **values: object) -> None:
        if values["step"] == 4:
            raise Left
        write(self, **values)

    MetricsFile.write = leave  # type: ignore[method-assign]
    try:
        fit(experiment, again, progress=False)
        raise AssertionError("it was not left")
    except Left:
        MetricsFile.write = write  # type: ignore[method-assign]
    left_at = lines(again)[-1][0]
    fit(experiment, again, progress=False)
    one, other = (load(directory, which="last") for directory in (whole, again))
    same = jax.tree.map(np.array_equal, one.params, other.params)
    return {
        "left_at": left_at,
        "lines": len(lines(whole)),
        "lines_equal": lines(whole) == lines(again),
        "steps": [one.step, other.step],
        "parameters_equal": all(jax.tree.leaves(same)),
    }


if __name__ == "__main__":
    text, directory = map(Path, sys.argv[1:])
    print(json.dumps({name: resumed(name, text, directory / str(i)) for i, name in enumerate(STRATEGIES)}))
