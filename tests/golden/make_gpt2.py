"""Make gpt2.npz: a tiny random GPT-2 of transformers and the logits it gives, for tests/test_parity.py.

    python -m pip install torch transformers numpy
    python tests/golden/make_gpt2.py

Every parameter is random, biases and norms too, so that nothing hides by being 0 or 1. Kept in float32, 40 KB.
Made last with transformers 5.23.0 and torch 2.13.0.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=37, n_positions=12, n_embd=16, n_layer=2, n_head=4)).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    tokens = torch.randint(0, 37, (3, 12))
    logits = model(tokens).logits

weights = {f"weights/{name}": value.numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
np.savez_compressed(Path(__file__).with_name("gpt2.npz"), tokens=tokens.numpy(), logits=logits.numpy(), **weights)
