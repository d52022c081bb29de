"""What do the layers of a run know, which heads look back, and which parts write its guess?

Question    from which layer on can the next token be read off the stream, and the token before the current one? Which heads
            find it? Which parts make the most likely next token more likely than the second?
Reference   the Jacobian lens: Gurnee et al. 2026, transformer-circuits.pub/2026/workspace; probes: Alain and Bengio 2016,
            arXiv:1610.01644; scores: Olsson et al. 2022, arXiv:2209.11895; attribution: Elhage et al. 2021,
            transformer-circuits.pub/2021/framework
Command     python experiments/interpretability/inspect_run.py runs/mine [--rows 16] [--out heads.png]
            needs the text that the run was trained on
Hardware    two cores of an AMD EPYC (family 25, model 1): half a minute of CPU time.
Expected    both lenses agree with the model more and more by layer, the Jacobian lens earlier. A probe cannot find the token
            before in the embedding, and finds it after the first layer, whose heads have read it.
Result      three layers of width 48, 200 steps of Tiny Shakespeare in characters, one seed, --rows 4. Logit lens by layer:
            0.49, 0.55, 0.68, 1.00. Jacobian lens: 0.31, 0.36, 0.62, 1.00. Probe: 0.825 from the embedding, 0.984 after the
            first layer, always the same answer 0.873. Highest score: induction 0.03, previous token 0.41.
Verdict     the probe is as expected. The Jacobian lens is behind the logit lens here, fitted to 256 tokens. A model that has
            learned so little has no induction heads.
"""

import argparse

import numpy as np
from analyses import (
    fit_jacobian_lens,
    fit_probe,
    induction_scores,
    jacobian_lens,
    logit_attribution,
    plot_heatmap,
    previous_token_scores,
    repeat_random_tokens,
)

from jaxgpt import Run, UserError, load
from jaxgpt.data.pipeline import Tokens
from jaxgpt.interventions import logit_lens
from jaxgpt.interventions import run as forward
from jaxgpt.interventions.model import stream_names
from jaxgpt.runs.resume import reopen_dataset

MOST_PARTS = 5  # parts of an attribution to print


def read_text(run: Run, rows: int) -> np.ndarray:
    """Return twice as many rows of the text that was held out, [2 rows, T]."""
    val = reopen_dataset(run.metadata, run.experiment.data, remedy="put that text back").val
    T = run.model.config.block_size
    if not isinstance(val, Tokens) or len(val) < 2 * rows * T:
        raise UserError(f"{run.directory} has no {2 * rows * T:,} held-out tokens of one text: give fewer --rows")
    return val.read(0, 2 * rows * T).reshape(2 * rows, T)


def compare_lenses(run: Run, fit_BT: np.ndarray, test_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how often the logit lens and the Jacobian lens guess the token that the model guesses, [L + 1] each."""
    of = (run.model, run.params)
    lenses = logit_lens(*of, test_BT), jacobian_lens(*of, test_BT, fit_jacobian_lens(*of, fit_BT))
    first, second = (np.asarray(logits_LBTV.argmax(-1)) for logits_LBTV in lenses)
    return tuple((guess_LBT == guess_LBT[-1]).mean(axis=(1, 2)) for guess_LBT in (first, second))


def probe_token_before(run: Run, tokens_BT: np.ndarray) -> tuple[list[float], float]:
    """Return the accuracies of probes for "is the token before the most frequent one?", and of always the same answer.

    There is one for each stream, [L + 1].
    """
    names = stream_names(run.model)
    found = forward(run.model, run.params, tokens_BT, read=names).activations
    is_it_U = (tokens_BT[:, :-1] == np.bincount(tokens_BT.ravel()).argmax()).ravel().astype(int)
    probes = [fit_probe(np.asarray(found[name])[:, 1:].reshape(len(is_it_U), -1), is_it_U) for name in names]
    return [probe.accuracy for probe in probes], probes[0].chance


def list_parts(run: Run, text_T: np.ndarray) -> list[tuple[str, float]]:
    """Return by how much each part raises the likeliest next token's logit over the second's, largest first."""
    logits_V = np.asarray(forward(run.model, run.params, text_T[None]).logits_BTV)[0, -1]
    second, best = np.argsort(logits_V)[-2:].tolist()
    found = logit_attribution(run.model, run.params, text_T, best, second)
    parts = {"embedding": found.embedding, "bias of the last norm": found.norm}
    parts |= {f"head {layer}.{head}": x for (layer, head), x in np.ndenumerate(found.heads_LN)}
    parts |= {f"MLP {layer}": x for layer, x in enumerate(found.mlps_L)}
    return sorted(((name, float(x)) for name, x in parts.items()), key=lambda part: -abs(part[1]))


def main(argv: list[str] | None = None) -> dict[str, np.ndarray]:
    """Print the tables. Return the scores of the heads, [L, N]."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--rows", type=int, default=16, help="rows of text that are read, and as many to fit the lens")
    parser.add_argument("--out", help="file for a picture of the scores of induction")
    options = parser.parse_args(argv)
    try:
        run = load(options.run)
        fit_BT, test_BT = np.split(read_text(run, options.rows), 2)
        T = test_BT.shape[1]
        repeated_BT = repeat_random_tokens(run.tokenizer.vocab_size, period=T // 2, length=T, rows=8)
        parts = list_parts(run, test_BT[0])
    except UserError as error:
        parser.exit(2, f"{error}\n")
    plain_L, jacobian_L = compare_lenses(run, fit_BT, test_BT)
    probe_L, chance = probe_token_before(run, test_BT)
    print("| stream | logit lens | Jacobian lens | probe of the token before |\n|---|---|---|---|")
    for row in zip(stream_names(run.model), plain_L, jacobian_L, probe_L, strict=True):
        print("| {} | {:.2f} | {:.2f} | {:.3f} |".format(*row))
    print(f"always the same answer instead of a probe: {chance:.3f}")
    scores = {
        "induction": np.asarray(induction_scores(run.model, run.params, repeated_BT, period=T // 2)),
        "previous token": np.asarray(previous_token_scores(run.model, run.params, repeated_BT)),
    }
    for name, scores_LN in scores.items():
        layer, head = np.unravel_index(scores_LN.argmax(), scores_LN.shape)
        print(f"{name}: head {layer}.{head} has the highest score, {scores_LN.max():.2f}")
    for name, logit in parts[:MOST_PARTS]:
        print(f"{name}: {logit:+.2f} for the likeliest next token")
    if options.out:
        plot_heatmap(scores["induction"], title="induction", unit="mean attention weight").savefig(options.out)
    return scores


if __name__ == "__main__":
    main()
