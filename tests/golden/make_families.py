"""Writes families.npz: what transformers' models say. Run it where transformers and torch are, from the repository's root:

python -m tests.golden.make_families
"""

import json
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from tests.hf.peers import NEW_TOKENS, PROMPT, SHAPES, make_peer, named_parameters


def main() -> None:
    found: dict[str, np.ndarray] = {
        "versions": np.array([f"{p} {metadata.version(p)}" for p in ("torch", "transformers")])
    }
    for name in SHAPES:
        model = make_peer(name)
        prompt = torch.tensor([PROMPT])
        options = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        with torch.no_grad():
            tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
            logits = model(tokens).logits[0]
        top = logits[len(PROMPT) - 1 : -1].topk(2).values
        margin = float((top[:, 0] - top[:, 1]).min())
        assert margin > 5e-5, (name, margin)  # else rounding, of 3e-5 at most, could decide
        found[f"{name}/config"] = np.array(json.dumps(model.config.to_diff_dict(), sort_keys=True))
        shapes = {key: list(x.shape) for key, x in named_parameters(model)}
        found[f"{name}/shapes"] = np.array(json.dumps(shapes))
        found[f"{name}/tokens"] = tokens[0].numpy().astype(np.int32)
        found[f"{name}/logits"] = logits.numpy()
        print(f"{name:18} logits up to {logits.abs().max():.1f}, least margin {margin:.4f}")
    np.savez_compressed(Path(__file__).parent / "families.npz", **found)


if __name__ == "__main__":
    main()
