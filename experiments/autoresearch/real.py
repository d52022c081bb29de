"""Run nights of autoresearch with edits whose effect is known: 20 that change nothing, and two that mend a flaw.

Question    Does `night.py`, with real training, keep what `measure.py` says of nights that are drawn from records?
Reference   see `night.py`.
Nights      Each begins with `../laptop/base.py` with two flaws, GELU and no norm of queries and keys, for 100 steps. Two edits
            mend one of them each; 20 rename the parameters of the MLP, which are then drawn anew with the same distribution.
            The order is drawn for each night. `greedy` and `floor` are the rules of `measure.py` on the night's first run of
            each edit.
Command     python experiments/autoresearch/real.py 1 --text shakespeare.txt    # and other numbers; a night resumes
            python experiments/autoresearch/real.py                             # what has been kept so far
Expected    Written before the first night: none of the null edits is kept, and both planted edits of 0.03 or more are.
            Written after 16 of the 22 proposals of a first night 1, which has begun anew since then: greedy keeps a null edit in
            at least eight of ten nights, and the floor in three to seven.
Result      9 nights, 113.8 runs each, one core each of a shared AMD EPYC (family 25, model 17, AVX-512), Python 3.13.0, jax
            0.12.0.1, 2026-11-29; 95% intervals:

            rule    null edits kept             true edits kept             nights that keep a null edit
            greedy  41 of 180 (16.9% to 29.6%)  18 of 18 (81.5% to 100.0%)  9 of 9 (66.4% to 100.0%)
            floor   18 of 180 (6.0% to 15.3%)   18 of 18 (81.5% to 100.0%)  7 of 9 (40.0% to 97.2%)
            night   0 of 180 (0.0% to 2.0%)     18 of 18 (81.5% to 100.0%)  0 of 9 (0.0% to 33.6%)

            An edit took 2.3 pairs if it was null, and 5.0 if true. The gains were 0.0492 to 0.2310. Null pairs have a
            deviation of 0.0039.
Verdict     It does: no null edit in nine nights, and every true one. Of greedy at least eight in ten nights were expected to keep a
            null edit, and 9 of 9 do; of the floor three to seven in ten, and 7 of 9 do.
"""

import argparse
import json
from pathlib import Path

import night
import numpy as np
from measure import NULL, interval

import jaxgpt
from jaxgpt.files import write_whole
from jaxgpt.tools.executor import Workers, open_executor
from jaxgpt.tools.grid import format_table

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results/autoresearch"  # a file for each night
SHOWN = ("verdict", "base", "losses")  # what the file of a night has of each proposal
# What real nights begin with, and their edits: two that mend it, and one that only renames parameters, which are then drawn
# anew with the same distribution.
FLAWED = """
experiment = dataclasses.replace(
    experiment, model=dataclasses.replace(experiment.model, activation="gelu", qk_norm=False)
)
"""
MENDED = [
    f"\nexperiment = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, {field}))\n"
    for field in ('activation="relu2"', "qk_norm=True")
]
RENAMED = """

from flax import linen as nn


class Renamed(nn.Module):
    inner: nn.Module

    def __call__(self, x_BTD, *, train=False):
        return self.inner(x_BTD, train=train)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenamedConfig(type(experiment.model)):
    def make_mlp(self, layer, compute):
        return Renamed(inner=super().make_mlp(layer, compute))


fields = {field.name: getattr(experiment.model, field.name) for field in dataclasses.fields(experiment.model)}
experiment = dataclasses.replace(experiment, model=RenamedConfig(**fields))
"""


def run(place: Path, number: int, text: str, on: str | None) -> list[dict]:
    """Run or resume a real night, the planted edits at random places, and return its history with what each edit was."""
    place.mkdir(parents=True, exist_ok=True)
    base = place / "flawed.py"
    base.write_text((HERE.parent / "laptop/base.py").read_text() + FLAWED)
    edits = np.random.default_rng(number).permutation([*MENDED, *[RENAMED] * NULL])

    def propose(folder: Path, proposal: int) -> None:
        (folder / "candidate.py").write_text((folder / "base.py").read_text() + edits[proposal - 1])

    values = {"train.steps": 100, "data.path": text}
    with open_executor(Workers(on=on), place) as executor:
        opened = night.Night(place, base, values, proposals=len(edits), seed=number)
        history = opened.go_on(propose, lambda said: print(said, flush=True), executor)
    named = zip(edits, history, strict=True)
    return [{"true": edit in MENDED} | {name: line[name] for name in SHOWN} for edit, line in named]


def keep_first(told: list[dict], floor: bool) -> list[bool]:
    """Return what a rule with one run of each edit would have kept: those below the last kept run, or far below it.

    It takes the first run that the night made of each edit. Where the night and the rule have not kept the same true edits
    by then, the loss is corrected by their mean gains. floor: a loss has to be lower by twice the difference of two runs.
    """
    best, other = told[0]["base"][0], told[0]["base"][1]
    noise, shift, kept = 2 * abs(best - other) if floor else 0.0, 0.0, []
    for line in told:
        loss = line["base"][0] + line["losses"][0] + shift
        kept.append(loss < best - noise)
        best = loss if kept[-1] else best
        shift += float(np.mean(line["losses"])) * (kept[-1] - (line["verdict"] == night.ACCEPTED)) * line["true"]
    return kept


def report() -> str:
    """Return what each rule has kept in the real nights so far."""
    nights = [json.loads(file.read_text()) for file in RESULTS.glob("*.json")]
    rules = {
        "greedy": [keep_first(told, floor=False) for told in nights],
        "floor": [keep_first(told, floor=True) for told in nights],
        "night": [[line["verdict"] == night.ACCEPTED for line in told] for told in nights],
    }
    true = np.array([[line["true"] for line in told] for told in nights])
    rows = []
    for rule, found in rules.items():
        kept, cells = np.array(found), []
        for group in (kept[~true], kept[true], (kept & ~true).any(1)):
            low, high = interval(int(group.sum()), group.size)
            cells.append(f"{group.sum()} of {group.size} ({low:.1%} to {high:.1%})")
        rows.append([rule, *cells])
    head = ["rule", "null kept (95%)", "true kept (95%)", "nights that keep a null edit (95%)"]
    pairs = np.array([[len(line["losses"]) for line in told] for told in nights])
    gains = np.array([[np.mean(line["losses"]) for line in told] for told in nights])[true]
    lines = [
        f"{len(nights)} real nights with {2 * pairs.sum(1).mean():.1f} runs each",
        "",
        format_table(head, rows),
        "",
    ]
    lines += [f"pairs of an edit: null {pairs[~true].mean():.1f}, true {pairs[true].mean():.1f}"]
    return "\n".join([*lines, f"true gains, by the mean of each edit's runs: {-gains.max():.4f} to {-gains.min():.4f}"])


def main(argv: list[str] | None = None) -> None:
    """Run or resume a night, or tell of those that have ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", nargs="?", type=int, help="number of a night, from 1")
    parser.add_argument("--runs", type=Path, default=Path("runs/autoresearch"), help="folder of the nights")
    parser.add_argument("--text", type=Path, help="file of Tiny Shakespeare")
    parser.add_argument("--on", help="local:2 or ray, as for `jaxgpt study`. None means this process")
    options = parser.parse_args(argv)
    if options.number is None:
        print(report())
        return
    jaxgpt.configure_jax()
    place = options.runs / str(options.number)
    told = run(place, options.number, str(options.text.resolve()), options.on)
    RESULTS.mkdir(exist_ok=True)
    write_whole(RESULTS / f"{options.number}.json", "[\n" + ",\n".join(map(json.dumps, told)) + "\n]\n")


if __name__ == "__main__":
    main()
