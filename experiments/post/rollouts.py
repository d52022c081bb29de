"""Rollouts: training rows that the model writes itself, scored by a reward.

It is no page: `grpo_arithmetic.py` trains with it. `RolloutConfig` is a base of a task's class, after the task, whose
defaults then count:

    class Rollouts(ArithmeticConfig, RolloutConfig): ...

Before each step the current parameters complete `batch_size / group` prompts `group` times each, in this process, by
jaxgpt's engine. A batch is a function of the parameters, the run's seed, the step and the row, and of nothing else.
So nothing is stored, and a resumed run, a replay and an audit draw the same tokens.

Log-probs   `old_logprobs_BT` are computed by the forward pass of the objective, in pieces of the shape that the step
            computes at once, and not taken from the engine, whose sums have another order. "sampler_gap" is the largest
            difference, both by the raw logits over the whole vocabulary ("whole" in `sampler_gap.py`), since the
            engine's log-probabilities know no temperature. On a CPU in float32, without dropout, adapters or a mesh,
            the step's own forward pass has the bits of the old ones, and the ratio is exactly 1. "exact" is 1 where
            that holds, and GRPO's "off_policy" is the share of tokens where the ratio is not.
Unfinished  A completion that has not ended within max_new_tokens gets the reward 0, and `reward` is not asked.
Metrics     "reward" and "length" (tokens, with the end) are means over completions, "finished" and "solved" the shares of
            those that ended, and of those with a reward of 1 or more. With `reference` the objective logs "kl".
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from grpo import GRPOConfig, advantages
from logprobs import token_logprobs
from tasks import ROLLOUTS, Examples, Form, TaskConfig, make_row

import jaxgpt
from jaxgpt import GPTConfig, UserError
from jaxgpt.batch import Batch
from jaxgpt.config.validate import NonNegativeFloat, PositiveInt, short
from jaxgpt.data.pipeline import Dataset
from jaxgpt.data.tokenizer import fingerprint
from jaxgpt.errors import first_line
from jaxgpt.layers.block import NO_SHARDING
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.sample import Sampling
from jaxgpt.sample.engine import Engine, Request
from jaxgpt.sample.quantize import for_decoding

MOST_SLOTS = 128  # completions that are drawn together


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(TaskConfig):
    """Completions of a task's prompts, with the advantages of their rewards for `grpo.GRPOConfig`."""

    group: PositiveInt = 8  # completions of each prompt. It divides train.batch_size
    max_new_tokens: PositiveInt = 64  # most tokens of a completion, with its end
    row: PositiveInt | None = None  # tokens that a row of training has, at most block_size. None means block_size
    temperature: NonNegativeFloat = 1.0  # divisor of the logits, as objective.temperature. 0 is greedy
    scale: bool = True  # divide the advantages of a prompt by the standard deviation of its rewards
    # rejection sampling: only completions with this reward are targets, for SFT. None means that all are
    keep: float | None = None
    reference: str | None = None  # run to stay close to, whose log-probabilities objective.kl needs. None means none
    bad_reward: Literal["stop", "zero"] = "stop"  # what a reward does that raises or is not finite

    def make_sampling(self) -> Sampling:
        """Return how completions are drawn."""
        return Sampling(temperature=self.temperature)

    def __init_subclass__(cls) -> None:
        """Raise `UserError` if the task comes after this class: its fields would have `TaskConfig`'s defaults."""
        task = cls.__mro__[cls.__mro__.index(RolloutConfig) + 1]
        if task is not TaskConfig:
            raise UserError(f"{cls.__name__}: name {task.__name__} before RolloutConfig, which hides its defaults")

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.keep is None and self.group < 2:
            raise UserError("data.group=1: one completion of a prompt has no advantage over others: draw at least 2")

    def open_dataset(self, model: GPTConfig, *, known: dict[str, Any] | None = None) -> Dataset:
        """Return the dataset: training rows are prompts, and `roll_out` completes them."""
        dataset = super().open_dataset(model, known=known)
        prompts = Prompts(self, Form(self, dataset.tokenizer), model.block_size, ROLLOUTS)
        made = Rollouts(self, prompts.form)
        if made.reference is not None and (context := made.reference[1].config.block_size) < model.block_size:
            raise UserError(
                f"data.reference={self.reference} has a context of {context}: needs block_size={model.block_size}"
            )
        return dataclasses.replace(dataset, train=prompts, roll_out=made)

    def shape_batch(self, tokens_BT: jax.ShapeDtypeStruct) -> Batch:
        """Return the shapes of a training batch, after the rollout."""
        if (count := math.prod(tokens_BT.shape[:-1])) % self.group:
            raise UserError(
                f"train.batch_size={count}: needs a multiple of data.group={self.group}, completions of a prompt"
            )
        *rows, T = tokens_BT.shape
        shape = *rows, min(self.row or T, T)
        tokens_BT = jax.ShapeDtypeStruct(shape, tokens_BT.dtype, sharding=tokens_BT.sharding)
        batch = super().shape_batch(tokens_BT)
        if self.keep is not None:
            return batch
        numbers_BT = jax.ShapeDtypeStruct(tokens_BT.shape, jnp.float32, sharding=tokens_BT.sharding)
        names = "advantages_BT", "old_logprobs_BT", *(["reference_logprobs_BT"] if self.reference else [])
        return batch._replace(extras=dict.fromkeys(names, numbers_BT))


class Prompts(Examples):
    """Rows of a prompt alone, each `group` times."""

    def row(self, n: int, block_size: int, seed: int) -> tuple[np.ndarray, ...]:
        """Return (inputs_T, targets_T, mask_T, segments_T), without targets."""
        prompt = self.task.draw_prompt(n // self.task.group, seed, self.stream)
        ids = self.form.encode(prompt)
        *_, segments = make_row(ids, ids[:1], block_size, prompt)  # there is room for a token
        inputs = np.zeros_like(segments)
        inputs[: len(ids)] = ids
        return inputs, np.zeros_like(segments), np.zeros(block_size, bool), segments


class Rollouts:
    """Complete batches of prompts: the `roll_out` of a dataset."""

    def __init__(self, config: RolloutConfig, form: Form):
        """Load the reference, if there is one. Raises `UserError` if it cannot score the policy's tokens."""
        self.config, self.form, self.end, self.engine, self.reference = config, form, form.end, None, None
        if config.reference is not None:
            run = jaxgpt.load(config.reference, setup=False)
            if fingerprint(run.tokenizer) != fingerprint(form.tokenizer):
                raise UserError(
                    f"data.reference={config.reference} has another tokenizer: name a run with the policy's"
                )
            self.reference = jax.tree.map(np.asarray, run.params), run.model

    def __call__(self, trainer: Trainer, params: dict, batch: Batch, key: jax.Array) -> tuple[Batch, dict[str, float]]:
        """Return (the batch of completions, metrics)."""
        config, objective, T = self.config, trainer.objective, trainer.abstract_batch.inputs_BT.shape[-1]
        if isinstance(objective, GRPOConfig) and objective.temperature != (config.temperature or 1.0):
            raise UserError(
                f"data.temperature={config.temperature} and objective.temperature={objective.temperature} differ: "
                "give both the same, since the ratio compares probabilities at one temperature"
            )
        model = trainer.model.clone(sharding=NO_SHARDING, attention_fn=trainer.options.attention_fn, parent=None)
        prompts = [
            row[:n].tolist() for row, n in zip(batch.inputs_BT, (batch.segments_BT > 0).sum(axis=1), strict=True)
        ]
        drawn = self.draw(model, params, prompts, key)
        rewards_B = np.array([self.judge(prompt, ids) for prompt, (ids, _) in zip(prompts, drawn, strict=True)])
        rows = [
            make_row(np.array(prompt), np.array(ids), T, "a rollout")
            for prompt, (ids, _) in zip(prompts, drawn, strict=True)
        ]
        made = Batch(*map(np.stack, zip(*rows, strict=True)))
        finished_B, lengths_B = np.array([ids[-1] == self.end for ids, _ in drawn]), made.mask_BT.sum(axis=1)
        logged = {"reward": rewards_B, "solved": rewards_B >= 1.0, "finished": finished_B, "length": lengths_B}
        metrics = {name: float(x.mean()) for name, x in logged.items()}
        if config.keep is not None:
            return made._replace(mask_BT=made.mask_BT & (rewards_B >= config.keep)[:, None]), metrics

        temperature = config.temperature or 1.0
        old_BT = whole_BT = self.score(trainer, model, params, made, temperature)
        if temperature != 1.0:
            whole_BT = self.score(trainer, model, params, made, 1.0)
        by_engine = np.concatenate([logprobs for _, logprobs in drawn])  # nan for an end
        metrics["sampler_gap"] = float(np.nanmax(np.abs(by_engine - whole_BT[made.mask_BT]), initial=0.0))
        is_exact = model.dtype == jnp.float32 and model.config.dropout == 0.0 and jax.default_backend() == "cpu"
        is_exact &= trainer.model.sharding is NO_SHARDING and trainer.abstract_state.frozen_params is None
        metrics["exact"] = float(is_exact)
        above_B = advantages(rewards_B.reshape(-1, config.group), config.scale).ravel()
        extras = {
            "advantages_BT": np.where(made.mask_BT, above_B[:, None], 0.0).astype(np.float32),
            "old_logprobs_BT": old_BT,
        }
        if self.reference is not None:
            reference_params, reference_model = self.reference
            extras["reference_logprobs_BT"] = self.score(trainer, reference_model, reference_params, made, temperature)
        return made._replace(extras=extras), metrics

    def draw(
        self, model: Any, params: dict, prompts: list[list[int]], key: jax.Array
    ) -> list[tuple[list[int], list[float]]]:
        """Return (ids, their log-probabilities by the engine) of each completion, with its end if it has ended.

        The engine is made once: its programs take any parameters.
        """
        model, params = for_decoding(model, params)
        if self.engine is None:
            known = self.form.tokenizer.vocab_size
            self.engine = Engine(model, params, slots=min(len(prompts), MOST_SLOTS), vocab_size=known, max_stops=1)
        engine, config, keys = self.engine, self.config, list(split_rows(key, len(prompts)))
        engine.params = params
        sampling = config.make_sampling()
        waiting, running = list(range(len(prompts)))[::-1], {}
        drawn: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        while waiting or running:
            while waiting and engine.num_free:
                request = Request(
                    prompt=prompts[waiting[-1]],
                    key=keys[waiting[-1]],
                    max_new_tokens=config.max_new_tokens,
                    sampling=sampling,
                    stop_tokens=(self.end,),
                    top_logprobs=0,
                )
                running[engine.submit(request)] = waiting.pop()
            engine.finish_reading()
            for piece in engine.decode():
                row = running[piece.slot] if piece.finish is None else running.pop(piece.slot)
                ids, logprobs = drawn[row]
                ids += piece.tokens + [self.end] * (piece.finish == "stop")
                logprobs += piece.logprobs + [math.nan] * (piece.finish == "stop")
        return drawn

    def judge(self, prompt: list[int], ids: list[int]) -> float:
        """Return the reward of a completion; 0 for one that has not ended."""
        if ids[-1] != self.end:
            return 0.0
        texts = self.form.decode(prompt), self.form.tokenizer.decode(ids[:-1])
        try:
            reward, why = float(self.config.reward(*texts)), "is not finite"
        except Exception as e:
            reward, why = math.nan, f"raised {type(e).__name__}: {first_line(e)}"
        if math.isfinite(reward):
            return reward
        if self.config.bad_reward == "zero":
            return 0.0
        said = f"the reward of {short(texts[1])} after {short(texts[0])} {why}"
        raise UserError(f"{said}: repair {type(self.config).__name__}.reward, or give --data.bad-reward zero")

    def score(self, trainer: Trainer, model: Any, params: dict, batch: Batch, temperature: float) -> np.ndarray:
        """Return log p(target) [B, T], of as many rows at once, and of the same ones, as a device takes in the step."""
        parts, turns = trainer.strategy.data_parallel_size, trainer.split.grad_accum_steps
        logprobs_BT = np.zeros(batch.inputs_BT.shape, np.float32)
        rows = np.arange(len(logprobs_BT)).reshape(parts, -1, turns).swapaxes(1, 2)
        for at in rows.reshape(parts * turns, -1):
            micro = jax.tree.map(lambda x, at=at: x[at], batch)
            logprobs_BT[at] = compute_logprobs(model, params, micro, temperature)
        return logprobs_BT


@functools.partial(jax.jit, static_argnums=(0, 3))
def compute_logprobs(model: Any, params: dict, batch: Batch, temperature: float) -> jax.Array:
    """Return log p(target) [B, T], as the objective computes it."""
    return token_logprobs(model, params, batch, temperature=temperature)


@functools.partial(jax.jit, static_argnums=1)
def split_rows(key: jax.Array, rows: int) -> jax.Array:
    """Return a key for each row, which does not depend on the number of rows."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))
