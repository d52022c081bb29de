"""The command line: `jaxgpt VERB ...`, equal to `python -m jaxgpt VERB ...`.

Each verb is a function in `verbs` whose options come from a dataclass in `options`, by tyro. Importing this module imports
no jax, so that help and mistakes answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from jaxgpt.cli import train as training
from jaxgpt.cli import use as using
from jaxgpt.cli.console import told_in_words
from jaxgpt.cli.experiment_file import close
from jaxgpt.config.presets import EXPERIMENTS
from jaxgpt.errors import UserError

USAGE = """\
usage: jaxgpt VERB [OPTIONS]

  train [EXPERIMENT]   train an experiment: a Python file with an `experiment` in it, or one of {experiments}
  sample [RUN]         continue a prompt from a trained run
  evaluate [RUN]       loss and bits per byte on held-out text
  study EXPERIMENT     variants of an experiment, several seeds each: which differ by more than noise
  xray [RUN]           what the model does with a text, piece by piece, as a page for a browser
  report [RUN]         what it learnt, how fast, what it writes, and what of that it has by heart, as a page
  replay [RUN]         one step of a run again, alone: its loss, and what made it not finite
  import-hf DIR        a model in Hugging Face's format becomes a run
  export-hf [RUN]      a run becomes a model in Hugging Face's format
  plan [EXPERIMENT]    memory, exchanges and speed of a training step, here or on a TPU slice, without running it

`jaxgpt VERB --help` lists the options. RUN is a run directory; without one, the newest under runs/.
"""

VERBS: dict[str, Callable[[list[str]], None]] = {
    "train": training.train,
    "sample": using.sample,
    "evaluate": using.evaluate,
    "study": training.study,
    "xray": using.xray,
    "report": using.report,
    "replay": training.replay,
    "plan": training.plan,
    "import-hf": using.import_hf,
    "export-hf": using.export_hf,
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command `jaxgpt`. Exit status 0: done; 2: the user's mistake, told in a line or two; 1: anything else."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with told_in_words():
        if not arguments or arguments[0] in ("-h", "--help"):
            print(USAGE.format(experiments=", ".join(EXPERIMENTS)), end="")
            return
        verb = arguments.pop(0)
        if verb not in VERBS:
            raise UserError(
                f"unknown verb {verb!r}{close(verb, VERBS)}. There are {', '.join(VERBS)}: see jaxgpt --help"
            )
        VERBS[verb](arguments)


if __name__ == "__main__":
    main()
