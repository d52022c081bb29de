"""Propose an edit that sets one field at random: the smallest proposer that keeps the contract of a night.

Question    none: it takes a proposer's place where none is at work, and shows what one does.
Reference   `program.md`.
Command     python experiments/autoresearch/night.py NIGHT --text shakespeare.txt --proposer
            "python experiments/autoresearch/mutator.py optim.beta2=0.9..0.99 model.activation=gelu,relu2,swiglu"
Expected    Most edits are given up after two or three pairs.
Result      see `measure.py`.
Verdict     none.
"""

import sys
from pathlib import Path

import numpy as np

from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.tools.sweep import parse_axes


def mutate(place: Path, over: list[str]) -> None:
    """Write candidate.py into the folder of a night. over: fields and their values, as for `jaxgpt sweep`."""
    base, history = place / "base.py", place / "history.jsonl"
    proposals = len(history.read_text().splitlines()) if history.exists() else 0
    axes, rng = parse_axes(over, load_experiment(str(base))), np.random.default_rng(proposals)
    axis = axes[rng.integers(len(axes))]
    change = f"replace_fields(experiment, {{{axis.field!r}: {axis.at(rng.random())!r}}})"
    lines = ["", "from jaxgpt.config.words import replace_fields", f"experiment = {change}", ""]
    (place / "candidate.py").write_text(base.read_text() + "\n".join(lines))


if __name__ == "__main__":
    mutate(Path(), sys.argv[1:])
