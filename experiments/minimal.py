"""A GPT in one page: text, batches, one training step on all devices, and a sample.

Everything else in jaxgpt is built around these five steps: it makes them fast, safe and comfortable, but not different.
It imports the core only: configuration, model, loss, training step, optimiser, and the plain sampler.

Command     python experiments/minimal.py [FILE.txt] [--steps 500]
Expected    a loss that falls from 4.5 to about 1.4 nats per character of Python's documentation, in half a minute on
            two CPU cores, and a sample with words in it. The text is the whole documentation of your Python.
"""

import argparse
import functools
import time
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.loss import make_loss
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.plain_generate import generate
from jaxgpt.train import init_state, train_step

parser = argparse.ArgumentParser()
parser.add_argument("file", nargs="?", type=Path, help="a text in UTF-8; without one, Python's own documentation")
parser.add_argument("--steps", type=int, default=500, help="training steps")
args = parser.parse_args()

# 1. Text becomes numbers: each character that occurs is a token.
text = args.file.read_text(encoding="utf-8") if args.file else "\n\n".join(topics[name] for name in sorted(topics))
characters = sorted(set(text))
token_of = {character: token for token, character in enumerate(characters)}
tokens = np.array([token_of[character] for character in text], np.int32)

# 2. The model: parameters are a tree of arrays, and the forward pass is a function of them and of tokens.
config = GPTConfig(
    vocab_size=len(characters),
    block_size=64,
    n_layer=4,
    n_head=4,
    n_embd=64,
    bias=False,
    norm="rmsnorm",
    activation="relu2",
    position="rope",
    residual_init="zero",
)
model = config.make_model()
optim = OptimConfig(learning_rate=4e-3)
optimizer = optim.make_optimizer(args.steps, model=config)
state = init_state(model, optimizer, jax.random.key(0))  # parameters, the optimiser's state, and the number of the step

# 3. One step, on all devices: each takes gradients of its own rows, and the averages make every copy step alike.
step = functools.partial(
    train_step,
    loss_fn=make_loss(model),
    optimizer=optimizer,
    schedule=optim.make_schedule(args.steps),
    mean=lambda sums: jax.lax.pmean(sums, "devices"),
)
parallel_step = jax.pmap(step, axis_name="devices", in_axes=(None, 0, None), out_axes=None, donate_argnums=0)

# 4. The loop: random windows of the text, each with the character that follows every one of its characters.
devices = jax.local_device_count()
rows = max(devices, 16 - 16 % devices)  # in a step, equally many on each device
key, rng = jax.random.key(1), np.random.default_rng(0)  # of dropout, which this model does without, and of the windows
print(f"{len(tokens):,} characters, {len(characters)} different; {rows} rows in a step; devices: {devices}")
began = time.monotonic()
for n in range(1, args.steps + 1):
    starts = rng.integers(len(tokens) - config.block_size, size=rows)
    windows = tokens[starts[:, None] + np.arange(config.block_size + 1)].reshape(devices, rows // devices, -1)
    state, metrics = parallel_step(state, Batch(windows[..., :-1], windows[..., 1:]), key)
    if n % 50 == 0 or n in (1, args.steps):
        print(f"step {n}  loss {metrics['loss']:.4f}  {time.monotonic() - began:.1f} s", flush=True)

# 5. A sample: the model's probabilities for the next character, one draw, and again. `generate` is compiled by jax.jit.
params = jax.tree.map(lambda x: x.addressable_data(0), state.params)  # one device's copy
(sample,) = generate(model, params, jnp.array(tokens[None, :1]), jax.random.key(2), max_new_tokens=300, temperature=0.8)
print("".join(characters[token] for token in np.asarray(sample)))
