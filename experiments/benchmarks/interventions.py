"""How fast is activation patching? Each head at each position, by TransformerLens and by jaxgpt.

Question:  are all head-by-position patches equal to TransformerLens's to 1e-4, in at most a fifth of its time?
Command:   python experiments/benchmarks/interventions.py      (needs pip install transformer-lens)
Models:    GPT-2 124M with random weights, three times as large as GPT-2's so that prompts matter, 15 random tokens of
           which two differ; and the quickstart, trained here and exported (a Qwen3), with 16 characters.
Method:    both read one directory in Hugging Face's format, in float32. The metric is the difference of two logits at the
           last position: of the tokens whose logits differ most between the prompts. TransformerLens runs its
           get_act_patch_attn_head_out_by_pos, without gradients and without folding of norms. The two take turns in one
           process; compilation is timed apart. The processor time of all cores is less disturbed by other work than the
           clock. A patch of TransformerLens is a whole forward pass, whatever the layer: with --parts 3 each round runs a
           third of its layers, and its time is three times that; three rounds compare all patches.
Result:    LOG.md, 2026-11-23, "activation patching beside TransformerLens", and 2026-11-24, "patches by whole blocks".
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import numpy as np
import pandas as pd
import torch
import transformers
from tokenizers import Tokenizer, models
from transformer_lens import TransformerBridge
from transformer_lens.patching import get_act_patch_attn_head_out_by_pos

import jaxgpt
from jaxgpt.interventions import patch, run
from jaxgpt.presets import quickstart
from jaxgpt.tools.convert import export_hf, import_model

PROMPTS = "Return a list of", "Return a dict of"  # of the quickstart
LENGTH, CHANGED = 15, [4, 9]  # tokens of GPT-2's prompts, and the positions that differ


def make_gpt2(directory: Path) -> tuple[jaxgpt.Run, np.ndarray, np.ndarray]:
    """Write GPT-2 124M with random weights to directory/hf. Return it, and a clean and a corrupted prompt."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim == 2 else 1)
    model.save_pretrained(directory / "hf")
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # TransformerLens needs some tokenizer
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="a", eos_token="a", pad_token="a"
    ).save_pretrained(directory / "hf")
    import_model(str(directory / "hf"), directory / "run", tokenizer="ids")
    rng = np.random.default_rng(0)
    clean_T = rng.integers(0, 50257, LENGTH)
    corrupted_T = clean_T.copy()
    corrupted_T[CHANGED] = rng.integers(0, 50257, len(CHANGED))
    return jaxgpt.load(directory / "run"), clean_T, corrupted_T


def make_quickstart(directory: Path) -> tuple[jaxgpt.Run, np.ndarray, np.ndarray]:
    """Train the quickstart and write it to directory/hf. Return it, and a clean and a corrupted prompt."""
    trained = jaxgpt.fit(quickstart(), run_dir=directory / "run")
    export_hf(directory / "run", directory / "hf")
    clean_T, corrupted_T = (np.array(trained.tokenizer.encode(text)) for text in PROMPTS)
    return trained, clean_T, corrupted_T


def measure(name: str, directory: Path, made: tuple, rounds: int, parts: int) -> None:
    """Patch by both in turns, and print equality and times."""
    run_, clean_T, corrupted_T = made
    logits_BV = np.array(run(run_.model, run_.params, [clean_T, corrupted_T]).logits_BTV[:, -1])
    right, wrong = int(np.argmax(logits_BV[0] - logits_BV[1])), int(np.argmin(logits_BV[0] - logits_BV[1]))

    def difference(logits_V):
        return logits_V[right] - logits_V[wrong]

    def ours() -> np.ndarray:
        return np.array(patch(run_.model, run_.params, corrupted_T, clean_T, "heads", difference))

    peer = TransformerBridge.boot_transformers(str(directory / "hf"), device="cpu")
    peer.enable_compatibility_mode(no_processing=True)
    clean_BT, corrupted_BT = (torch.tensor(x[None]) for x in (clean_T, corrupted_T))
    _, cache = peer.run_with_cache(clean_BT)

    def theirs(layers: range) -> np.ndarray:
        axes = [layers, range(len(clean_T)), range(peer.cfg.n_heads)]
        index = pd.MultiIndex.from_product(axes, names=["layer", "pos", "head"]).to_frame(index=False)
        found = get_act_patch_attn_head_out_by_pos(
            peer,
            corrupted_BT,
            cache,
            lambda logits_BTV: difference(logits_BTV[0, -1]),
            index_axis_names=None,
            index_df=index,
        )
        return found.numpy().reshape(*map(len, axes))

    began = time.perf_counter()
    ours_LTN = ours()
    first, layers = time.perf_counter() - began, peer.cfg.n_layers
    theirs(range(1))
    theirs_LTN, times = np.full_like(ours_LTN, np.nan), {"TransformerLens": [], "jaxgpt": []}
    for number in range(rounds):
        part = range(number % parts, layers, parts)
        for who, seconds in times.items():
            began, used = time.perf_counter(), time.process_time()
            if who == "jaxgpt":
                ours()
            else:
                theirs_LTN[part.start :: parts] = theirs(part)
            share = len(part) / layers if who != "jaxgpt" else 1
            seconds.append(((time.perf_counter() - began) / share, (time.process_time() - used) / share))
            print(
                f"{name}, round {number}, {who}: {seconds[-1][0]:.3g} s, {seconds[-1][1]:.3g} s of processors",
                flush=True,
            )
    clean, corrupted = difference(logits_BV[0]), difference(logits_BV[1])
    error, compared = np.nanmax(np.abs(ours_LTN - theirs_LTN)), np.isfinite(theirs_LTN).sum()
    print(f"{name}: {compared} of {ours_LTN.size} patches compared, largest difference {error:.1e}")
    print(
        f"  metric: {clean:.3f} clean, {corrupted:.3f} corrupted, {ours_LTN.min():.3f} to {ours_LTN.max():.3f} patched"
    )
    for i, what in enumerate(("by the clock", "of processors")):
        clocks = {who: [each[i] for each in seconds] for who, seconds in times.items()}
        clocks["ratio"] = [theirs / ours for theirs, ours in zip(*clocks.values(), strict=True)]
        cells = [f"{who} {statistics.median(x):.3g} ({min(x):.3g} to {max(x):.3g})" for who, x in clocks.items()]
        print(f"  median seconds {what}: {', '.join(cells)}")
    print(f"  our first call, with compilation: {first:.1f} s")


def main() -> None:
    """Measure both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", type=int, default=1, help="of GPT-2's layers, one in each round of TransformerLens")
    parser.add_argument("--model", choices=["quickstart", "gpt2"], action="append", help="default: both")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    for name in options.model or ["quickstart", "gpt2"]:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            made = (make_gpt2 if name == "gpt2" else make_quickstart)(directory)
            measure(name, directory, made, options.rounds, options.parts if name == "gpt2" else 1)


if __name__ == "__main__":
    main()
