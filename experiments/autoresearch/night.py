"""Improve one file overnight by edits that a command proposes, and keep none of them by chance.

Question    "Keep the edit if its loss is lower" keeps seeds. How often does a night keep an edit that is no better, and which
            gains does it miss, if each edit is trained beside its base until an always-valid test has an answer?
Reference   github.com/karpathy/autoresearch: a change of the seed was kept (issues 466, 131 and 278), and a floor of noise
            was proposed, twice the difference of two runs of the base (pull request 560). The test is Lai 1976, Annals of
            Statistics 4, 265-280, with the normal prior of Wang and Ramdas 2024, arXiv:2310.03722, here on one side; see also
            Perez-Ortiz et al. 2024, arXiv:2208.07610. Errors are shared as in Tian and Ramdas 2021, arXiv:1910.04900.
Test        `weigh`; `program.md` says why looking after each pair is allowed, and how 5% are shared by all edits of a night.
Command     python experiments/autoresearch/night.py NIGHT --text shakespeare.txt --proposer "COMMAND"
            For COMMAND see `program.md`; "python experiments/autoresearch/mutator.py optim.beta2=0.9..0.99" is one.
            --on local:2 or --on ray trains both runs of a pair at once. The same command resumes.
Expected    see `measure.py`, as for the result and the verdict.
"""

import argparse
import difflib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from filelock import FileLock

import jaxgpt
from jaxgpt import Experiment, UserError
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.config.serialize import differences
from jaxgpt.config.words import replace_fields
from jaxgpt.errors import first_line
from jaxgpt.files import Json, Say, write_whole
from jaxgpt.runs.code import own_code
from jaxgpt.tools.executor import Executor, Workers, open_executor
from jaxgpt.tools.grid import train_grid
from jaxgpt.tools.replay import audit

HERE = Path(__file__).resolve().parent
ERROR = 0.05  # the probability that a night accepts any edit that is no better is at most this
LEAST = 0.001  # nats per token: a smaller gain is none
SPREAD = 2.0  # the prior of a gain, in deviations of a difference: half a normal distribution with this deviation
PAIRS = 16  # most pairs of an edit
ACCEPTED, GIVEN_UP, REFUSED = "accepted", "given up", "refused"
# What base and edit must share, so that they reach their losses from the same tokens.
FIXED = ("data.", "objective.", "train.", "parallel.", "model.block_size", "model.vocab_size")


def weigh(losses: np.ndarray) -> np.ndarray:
    """Return the evidence for a gain after each pair, [..., pairs], from differences of losses, edit minus base."""
    from scipy.special import stdtr  # scipy is a dependency of jax

    x = np.asarray(losses, np.float64) + LEAST
    n = np.arange(1, x.shape[-1] + 1)
    root = np.sqrt((x * x).cumsum(-1))
    t = x.cumsum(-1) / np.where(root > 0, root, 1.0)
    precision = n + SPREAD**-2  # what is known of the mean, in deviations, by the pairs and the prior
    both_sides = (1 - t**2 / precision) ** (-n / 2) / np.sqrt(n * SPREAD**2 + 1)
    return 2 * both_sides * stdtr(n, -t * np.sqrt(n / (precision - t**2)))


def decide(losses: list[float], level: float) -> str | None:
    """Return the verdict on an edit after the pairs that it has, None if it needs another."""
    evidence = weigh(np.array(losses))[-1]
    if evidence >= 1 / level:
        return ACCEPTED
    return GIVEN_UP if len(losses) == PAIRS or (len(losses) > 1 and evidence < 1) else None


def level_of(history: list[Json], proposals: int) -> float:
    """Return the level of the next proposal. What was tested and not accepted has spent its own."""
    left = ERROR - sum(line["level"] for line in history if line["verdict"] != ACCEPTED)
    return left / (proposals - len(history))


def why_refused(base: Experiment, edit: Experiment) -> str:
    """Return why an edit is not measured by the contract, or an empty text."""
    changed = sorted(differences(base, edit).keys() - {"name"})
    if not changed and not own_code(edit):
        return "it changes no field and no class"
    fixed = [field for field in changed if field.startswith(FIXED) or field in ("data", "objective")]
    return f"it changes {', '.join(fixed)}" if fixed else ""


class Night:
    """A night in a folder: what is decided is in its history, and what is trained is not trained again."""

    def __init__(self, place: Path, base: Path, values: Json, *, proposals: int, seed: int = 0) -> None:
        """Open or begin a night. values: the fields of base and edits that the night sets. seed: another for each night."""
        self.place, self.values, self.proposals, self.seed = place, values, proposals, seed
        if not self.edit(0).exists():
            self.edit(0).parent.mkdir(parents=True)
            shutil.copy(base, self.edit(0))
        shutil.copy(HERE / "program.md", place)
        file = place / "history.jsonl"
        self.history = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def edit(self, number: int) -> Path:
        """Return the file of a proposal. 0 is the base at the beginning."""
        return self.place / f"edits/{number:03d}/edit.py"

    def load(self, file: Path) -> Experiment:
        """Return the experiment of a file, with the fields that the night sets."""
        return replace_fields(load_experiment(str(file)), self.values)

    def go_on(self, propose: Callable[[Path, int], object], say: Say, executor: Executor | None = None) -> list[Json]:
        """Test all proposals that are left, and return the history. propose: writes candidate.py into a folder."""
        while (number := len(self.history) + 1) <= self.proposals:
            accepted = [line["proposal"] for line in self.history if line["verdict"] == ACCEPTED]
            written, base = self.place / "candidate.py", self.edit(max(accepted, default=0))
            if not self.edit(number).exists():
                written.unlink(missing_ok=True)
                shutil.copy(base, self.place / "base.py")
                propose(self.place, number)
                if written.exists():
                    self.edit(number).parent.mkdir(exist_ok=True)
                    written.replace(self.edit(number))
            line = {"proposal": number, "level": 0.0, "losses": []} | self.test(number, base, executor, say)
            self.history.append(line)
            write_whole(self.place / "history.jsonl", "".join(json.dumps(each) + "\n" for each in self.history))
            if line["verdict"] != ACCEPTED:
                shutil.rmtree(self.place / f"runs/{number:03d}", ignore_errors=True)
            say(f"proposal {number}: {line['verdict']}, {line['why']} ({len(line['losses'])} pairs)")
        return self.history

    def test(self, number: int, base: Path, executor: Executor | None, say: Say) -> Json:
        """Train an edit beside its base until there is a verdict, and return it."""
        try:
            old, new = self.load(base), self.load(self.edit(number))
            why = why_refused(old, new)
        except (UserError, OSError) as e:
            why = first_line(e)
        if why:
            return {"verdict": REFUSED, "why": why}
        texts = [file.read_text().splitlines() for file in (base, self.edit(number))]
        changed = [x for x in difflib.unified_diff(*texts, n=0, lineterm="") if x[:2] not in ("--", "++", "@@")]
        tested = {"level": level_of(self.history, self.proposals), "changed": changed, "base": [], "losses": []}
        verdict = None
        while verdict is None:
            seed = (self.seed * 1000 + number) * 100 + len(tested["losses"])
            grid = [
                (f"{name} {number}, seed {seed}", replace_fields(experiment, {"train.seed": seed}), place)
                for name, experiment, place in zip(("base", "edit"), (old, new), self.runs(number, seed), strict=True)
            ]
            ours, its = train_grid(grid, say, executor)
            if not ours.losses:
                raise UserError(f"{grid[0][2]}: the base has no loss, {ours.failure}")
            if not its.losses:
                return tested | {"verdict": GIVEN_UP, "why": f"seed {seed}: {its.failure}"}
            tested["base"].append(ours.losses[-1])
            tested["losses"].append(its.losses[-1] - ours.losses[-1])
            verdict = decide(tested["losses"], tested["level"])
        evidence, gain = weigh(np.array(tested["losses"]))[-1], float(np.mean(tested["losses"]))
        why = f"{gain:+.4f}, evidence {evidence:.3g} of {1 / tested['level']:.0f}"
        if verdict == ACCEPTED:
            best = seed - len(tested["losses"]) + 1 + int(np.argmin(tested["losses"]))
            runs = self.runs(number, best)
            audits = map(audit, runs) if executor is None else [executor.submit(audit, run).result() for run in runs]
            for finding in (finding for each in audits for finding in each.findings):
                verdict, why = GIVEN_UP, f"not repeated: {finding}"
        return tested | {"verdict": verdict, "why": why}

    def runs(self, number: int, seed: int) -> list[Path]:
        """Return the directories of a pair, base and edit."""
        return [self.place / f"runs/{number:03d}/{seed}-{name}" for name in ("base", "edit")]


def main(argv: list[str] | None = None) -> None:
    """Begin or resume a night."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("night", type=Path, help="folder of the night")
    parser.add_argument("--base", type=Path, default=HERE.parent / "laptop/base.py", help="where the night begins")
    parser.add_argument("--text", help="file of the text, by default the base's data")
    parser.add_argument("--steps", type=int, help="steps of each run, by default the base's")
    parser.add_argument("--proposer", required=True, help="command that writes candidate.py in the folder of the night")
    parser.add_argument("--proposals", type=int, default=22)
    parser.add_argument("--seed", type=int, default=0, help="another one for each night")
    parser.add_argument("--on", help="local:2 or ray, as for `jaxgpt study`. None means this process")
    options = parser.parse_args(argv)
    values = {"train.sample_tokens": 0}
    if options.steps:
        values["train.steps"] = options.steps
    if options.text:
        values["data.path"] = str(Path(options.text).resolve())
    command = [str(Path(word).absolute()) if Path(word).is_file() else word for word in shlex.split(options.proposer)]
    jaxgpt.configure_jax()
    options.night.mkdir(parents=True, exist_ok=True)
    with FileLock(options.night / "lock", timeout=0), open_executor(Workers(on=options.on), options.night) as executor:
        night = Night(options.night, options.base, values, proposals=options.proposals, seed=options.seed)
        night.go_on(lambda place, number: subprocess.run(command, cwd=place, check=True), print, executor)


if __name__ == "__main__":
    sys.exit(main())
