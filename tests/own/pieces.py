"""A user's own file: a layer, two attentions, an optimiser, an objective, data and a callback. Nothing of jaxgpt's is edited."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxgpt import DataConfig, Experiment, GPTConfig, ObjectiveConfig, OptimConfig, TrainConfig
from jaxgpt.config.validate import Count, PositiveFloat
from jaxgpt.data.pipeline import Dataset, Split
from jaxgpt.data.tokenizer import ByteTokenizer, fingerprint
from jaxgpt.layers.attention import Attention
from jaxgpt.layers.kernels.cached import is_decoding
from jaxgpt.layers.linear import Dense

# A layer: a soft mixture of experts, whose matrices have three axes, with a balance loss.


class Experts(nn.Module):
    n_expert: int
    hidden: int

    @nn.compact
    def __call__(self, x_BTD, *, train=False):
        D, init = x_BTD.shape[-1], nn.initializers.normal(0.1)
        up_EDF = self.param("up", init, (self.n_expert, D, self.hidden))
        down_EFD = self.param("down", init, (self.n_expert, self.hidden, D))
        gates_BTE = jax.nn.softmax(Dense(self.n_expert, use_bias=False, name="router")(x_BTD))
        self.sow("losses", "balance", 0.01 * jnp.square(gates_BTE.mean((0, 1))).sum() * self.n_expert)
        self.sow("metrics", "largest_gate", gates_BTE.max(axis=-1).mean())
        h_BTEF = jax.nn.relu(jnp.einsum("BTD,EDF->BTEF", x_BTD, up_EDF))
        return jnp.einsum("BTEF,EFD,BTE->BTD", h_BTEF, down_EFD, gates_BTE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig(GPTConfig):
    n_expert: Count = 3  # experts of each block

    def make_mlp(self, layer, compute):
        return Experts(n_expert=self.n_expert, hidden=4)


# An attention with a state of its own: a moving average over the tokens before.


class Average(nn.Module):
    width: int

    def setup(self):
        self.read, self.write = Dense(self.width), Dense(self.width)

    def __call__(self, x_BTD, positions_BT=None, *, segments_BT=None, train=False):
        B, T, _ = x_BTD.shape
        positions_BT = jnp.broadcast_to(jnp.arange(T) if positions_BT is None else positions_BT, (B, T))
        valid_BT = jnp.ones((B, T), bool) if segments_BT is None else segments_BT > 0

        def step(state_BD, token):
            x_BD, position_B, valid_B = token
            state_BD = jnp.where((position_B == 0)[:, None], 0.0, state_BD)
            state_BD = jnp.where(valid_B[:, None], 0.5 * state_BD + x_BD, state_BD)
            return state_BD, state_BD

        tokens = self.read(x_BTD).swapaxes(0, 1), positions_BT.T, valid_BT.T
        before_BD = self.get_variable("cache", "state", jnp.zeros((B, self.width)))
        state_BD, states_TBD = jax.lax.scan(step, before_BD, tokens)
        if is_decoding(self):
            self.put_variable("cache", "state", state_BD)
        return self.write(states_TBD.swapaxes(0, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AverageConfig(GPTConfig):
    has_cache = True

    def make_attention(self, layer, compute):
        return Average(self.n_embd)


# An attention without one, which jaxgpt's cache would compute wrongly: scores fall with the distance.


class Distance(Attention):
    def attend(self, q_BTNH, k_BSKH, v_BSKH, *, positions_BT=None, segments_BT=None, train=False):
        T = q_BTNH.shape[1]
        distance_TS = (jnp.arange(T)[:, None] - jnp.arange(T)[None]).astype(jnp.float32)
        scores = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSKH) * self.scale - distance_TS[None, None]
        weights = jax.nn.softmax(jnp.where(distance_TS[None, None] < 0, -jnp.inf, scores))
        return jnp.einsum("BNTS,BSNH->BTNH", weights, v_BSKH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceConfig(GPTConfig):
    def make_attention(self, layer, compute):
        return Distance(n_embd=self.n_embd, n_head=self.n_head, scale=0.5, dtype=compute.dtype)


# An optimiser that asks for the loss, has a rate of its own, and an average that is evaluated.


def by_loss(rate: float) -> optax.GradientTransformationExtraArgs:
    """Steps as long as the loss is high."""

    def update(updates, state, params=None, *, value_and_grad, **_):
        value, _ = value_and_grad(params)
        return jax.tree.map(lambda g: -rate * value / (value + 1.0) * g, updates), {"learning_rate": rate * value}

    return optax.GradientTransformationExtraArgs(lambda params: {"learning_rate": jnp.zeros(())}, update)


def mean(keep: float) -> optax.GradientTransformation:
    """Averages the parameters after each step."""

    def update(updates, state, params=None):
        def mix(mean, x, u):
            return keep * mean + (1 - keep) * (x + u)

        return updates, {"mean": jax.tree.map(mix, state["mean"], params, updates)}

    return optax.GradientTransformation(lambda params: {"mean": jax.tree.map(jnp.copy, params)}, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptim(OptimConfig):
    keep: PositiveFloat = 0.5  # share of the average that a step keeps

    def make_optimizer(self, steps, *, model):
        clip = optax.clip_by_global_norm(1.0)
        return optax.chain(clip, by_loss(self.learning_rate), mean(self.keep))

    def metrics(self, grads, updates, opt_state):
        return {"update_norm": optax.tree.norm(updates), "mean_norm": optax.tree.norm(opt_state[-1]["mean"])}

    def eval_params(self, opt_state, params):
        return opt_state[-1]["mean"]


# An objective, which also penalises large logits.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZLoss(ObjectiveConfig):
    z: PositiveFloat = 0.01  # weight of the squared logarithm of the sum

    def make_loss(self, model, *, head_loss=None, label_smoothing=0.0):
        plain = super().make_loss(model, label_smoothing=label_smoothing)

        def loss(params, batch, key):
            nats, count, metrics = plain(params, batch, key)
            if key is None:
                return nats, count, metrics
            logits_BTV = model.apply({"params": params}, batch.inputs_BT, segments_BT=batch.segments_BT)
            z = jnp.square(jax.nn.logsumexp(logits_BTV, axis=-1)).mean() * count
            return nats + self.z * z, count, metrics | {"z": z}

        return loss


# Data: an endless stream of sums, of which no file is written.


@dataclasses.dataclass(frozen=True)
class Sums(Split):
    seed: int
    tokens: int

    def __len__(self):
        return self.tokens

    def row(self, n: int, block_size: int, seed: int):
        rng, text = np.random.default_rng([self.seed, seed, n]), ""
        while len(text) <= block_size:
            a, b = rng.integers(10, size=2)
            text += f"{a}+{b}={a + b} "
        ids = np.frombuffer(text[: block_size + 1].encode(), np.uint8).astype(np.int32)
        return ids[:-1], ids[1:]

    def training_rows(self, *, block_size, seed):
        return functools.partial(self.row, block_size=block_size, seed=seed)

    def validation_rows(self, *, block_size, stride, max_tokens, prefix_length):
        return 4, lambda n: (*self.row(n, block_size, 0), np.full(block_size, n < 4))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumsConfig(DataConfig):
    stream: int = 7  # seed of the stream

    def open_dataset(self, model: GPTConfig, *, known: dict[str, Any] | None = None) -> Dataset:
        digest = hashlib.sha256(str(self.stream).encode()).hexdigest()
        tokenizer = ByteTokenizer()
        made_of = {"stream": digest, "tokenizer_sha256": fingerprint(tokenizer)}
        splits = {"train": Sums(self.stream, 10**6), "val": Sums(self.stream + 1, 4 * model.block_size)}
        return Dataset(**splits, tokenizer=tokenizer, fingerprint=made_of)


SEEN: list[dict] = []
callbacks = [SEEN.append]  # a callback

SMALL = dict(block_size=16, n_layer=1, n_head=2, n_embd=8)
data = SumsConfig()
train = TrainConfig(steps=6, batch_size=4, log_every=1, eval_every=3, checkpoint_every=2, keep_last=3, sample_tokens=8)
plain = Experiment(name="own", model=GPTConfig(**SMALL), data=data, train=train, optim=OptimConfig(warmup_steps=1))
layer = dataclasses.replace(plain, model=ExpertConfig(**SMALL), optim=OptimConfig(name="muon", warmup_steps=1))
attention = dataclasses.replace(plain, model=AverageConfig(**SMALL))
distance = dataclasses.replace(plain, model=DistanceConfig(**SMALL))
optimizer = dataclasses.replace(plain, optim=LossOptim(learning_rate=0.5))
objective = dataclasses.replace(plain, objective=ZLoss())
experiment = dataclasses.replace(
    plain, model=ExpertConfig(**SMALL, n_expert=4), optim=LossOptim(learning_rate=0.5), objective=ZLoss()
)
variants = {"plain": plain, "own": experiment}
