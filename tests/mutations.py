"""Break one line of the package at a time, and see that a test fails. Run by hand:

    python -m tests.mutations [--list] [--only NAME ...]

Each line is broken in a copy of the repository, where the test named beside it runs. First the tests run unbroken: one
that fails anyway notices nothing. The exit status is 1 if a mutation survives.
"""

import argparse
import ast
import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.conftest import REPOSITORY

DEADLINE = 900.0  # seconds of a pytest, which ends in SIGKILL
PASSED, FAILED = 0, 1  # pytest's exit status; any other: it did not run the tests


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A mistake, and the test that notices it."""

    name: str
    file: str  # below jaxgpt/
    old: str  # occurs once in the file
    new: str
    test: str  # pytest's node id, below tests/


MUTATIONS = (
    # The loss
    Mutation(
        "smoothing-keeps-all-of-the-target",
        "loss.py",
        "(1.0 - smoothing) * nats_BT",
        "nats_BT",
        "encdec/test_encoder.py::test_label_smoothing_is_optaxs",
    ),
    Mutation(
        "masked-targets-counted",
        "loss.py",
        "return jnp.sum(nats_BT, where=mask_BT), jnp.sum(mask_BT, dtype=jnp.float32)",
        "return jnp.sum(nats_BT, where=mask_BT), jnp.float32(mask_BT.size)",
        "test_loss.py::test_masked_targets_do_not_count_whatever_they_are",
    ),
    Mutation(
        "chunked-gradient-unscaled",
        "loss.py",
        "(g * scale).astype(g.dtype)",
        "g",
        "test_loss.py::test_in_chunks_it_is_the_same_loss_and_the_same_gradient[2-False]",
    ),
    Mutation(
        "loss-without-smoothing",
        "loss.py",
        "batch.mask_BT, smoothing=label_smoothing)",
        "batch.mask_BT)",
        "test_loss.py::test_in_chunks_it_is_the_same_loss_and_the_same_gradient[2-False]",
    ),
    Mutation(
        "chunked-loss-without-smoothing",
        "loss.py",
        "functools.partial(head_loss, model, smoothing=label_smoothing)",
        "functools.partial(head_loss, model)",
        "test_loss.py::test_in_chunks_it_is_the_same_loss_and_the_same_gradient[2-False]",
    ),
    Mutation(
        "training-without-smoothing",
        "parallel/trainer.py",
        "label_smoothing=experiment.optim.label_smoothing",
        "label_smoothing=0.0",
        "parallel/test_strategies.py::test_on_several_devices[quick_curves]",
    ),
    # The step
    Mutation(
        "one-dropout-key-for-all-steps",
        "train.py",
        "step_key = jax.random.fold_in(key, state.step)",
        "step_key = key",
        "test_train.py::test_every_step_draws_its_own_dropout",
    ),
    Mutation(
        "one-dropout-key-for-all-micro-batches",
        "train.py",
        "jax.random.fold_in(step_key, index))",
        "step_key)",
        "test_train.py::test_micro_batches_draw_their_own_dropout",
    ),
    Mutation(
        "gradients-of-the-sum",
        "train.py",
        "lambda g: g / count, grads",
        "lambda g: g, grads",
        "test_train.py::test_gradients_are_those_of_the_mean_loss",
    ),
    Mutation(
        "rate-ignores-skipped-steps",
        "train.py",
        "schedule(steps_taken)",
        "schedule(state.step)",
        "test_train.py::test_a_step_that_is_not_finite_is_as_if_it_had_not_been[1]",
    ),
    Mutation(
        "skipped-in-a-row-never-reset",
        "train.py",
        "choose(0, before.in_a_row + 1)",
        "choose(before.in_a_row, before.in_a_row + 1)",
        "test_train.py::test_a_step_that_is_not_finite_is_as_if_it_had_not_been[1]",
    ),
    Mutation(
        "spikes-judged-one-step-late",
        "train.py",
        "steps_taken >= MIN_NORMS",
        "steps_taken > MIN_NORMS",
        "test_train.py::test_spikes_are_judged_by_the_median_of_the_steps_taken",
    ),
    Mutation(
        "spikes-over-the-mean",
        "train.py",
        "jnp.nanmedian(before.norms)",
        "jnp.nanmean(before.norms)",
        "test_train.py::test_spikes_are_judged_by_the_median_of_the_steps_taken",
    ),
    Mutation(
        "guard-remembers-half",
        "train.py",
        "[steps_taken % NUM_NORMS]",
        "[steps_taken % (NUM_NORMS // 2)]",
        "test_train.py::test_spikes_are_judged_by_the_median_of_the_steps_taken",
    ),
    Mutation(
        "best-loss-forgotten-on-resume",
        "fitting.py",
        "best = min((loss for loss in losses if loss is not None), default=math.inf)",
        "best = math.inf",
        "test_session.py::test_the_best_so_far_is_known_after_a_resume",
    ),
    Mutation(
        "ruined-parameters-saved",
        "loop.py",
        "if not skipped_in_a_row or val_loss is not None or signal is not None:",
        "if True:",
        "test_loop.py::test_a_checkpoint_that_is_due_after_a_skipped_step_waits_for_the_next_taken_one",
    ),
    Mutation(
        "best-loss-never-moves",
        "loop.py",
        "best, is_due = val_loss, True",
        "is_due = True",
        "test_loop.py::test_only_a_better_loss_is_a_reason_to_save",
    ),
    Mutation(
        "signal-in-a-validation-overlooked",
        "loop.py",
        "signal = stop(None)",
        "pass",
        "test_loop.py::test_a_signal_in_a_validation_ends_the_run_with_what_was_measured",
    ),
    Mutation(
        "all-steps-in-flight",
        "loop.py",
        "while len(in_flight) > most:",
        "while len(in_flight) > most + 1:",
        "test_loop.py::test_at_most_two_steps_are_in_flight",
    ),
    # The optimiser
    Mutation(
        "adamw-without-schedule",
        "optim.py",
        "scale_by_learning_rate(learning_rate(config, steps))",
        "scale_by_learning_rate(config.learning_rate)",
        "test_optim.py::test_adamw_is_its_formula",
    ),
    Mutation("adamw-eps-ignored", "optim.py", "eps=config.eps", "eps=1e-8", "test_optim.py::test_adamw_is_its_formula"),
    Mutation(
        "adamw-beta2-ignored", "optim.py", "b2=config.beta2", "b2=0.99", "test_optim.py::test_adamw_is_its_formula"
    ),
    Mutation(
        "embeddings-do-not-decay",
        "optim.py",
        '"kernel", "embedding", ',
        '"kernel", ',
        "test_optim.py::test_weight_decay_is_on_matrices_only[adamw-False]",
    ),
    Mutation(
        "adapters-do-not-decay",
        "optim.py",
        '"embedding", "lora_a", "lora_b"',
        '"embedding"',
        "test_optim.py::test_weight_decay_is_on_matrices_only[adamw-False]",
    ),
    Mutation(
        "mup-rates-of-matrices",
        "optim.py",
        "in_block or",
        "",
        "test_mup.py::test_the_last_norm_is_the_output_multiplier",
    ),
    Mutation(
        "mup-rate-of-the-last-norm",
        "optim.py",
        ' or _name(path[0]) == "ln_f"',
        "",
        "test_mup.py::test_the_last_norm_is_the_output_multiplier",
    ),
    Mutation(
        "mup-decay-scaled",
        "optim.py",
        "            config.weight_decay,",
        "            config.weight_decay * width_ratio,",
        "test_mup.py::test_decay_is_not_scaled",
    ),
    Mutation(
        "mup-not-trained-with",
        "parallel/trainer.py",
        ", width_ratio=experiment.model.width_ratio",
        "",
        "test_mup.py::test_at_the_base_width_it_is_the_standard_parametrisation",
    ),
    Mutation(
        "mup-output-not-multiplied",
        "model.py",
        "first_scale=c.width_ratio",
        "first_scale=1.0",
        "test_mup.py::test_the_last_norm_starts_at_the_ratio",
    ),
    Mutation(
        "mup-initial-variance-of-width-squared",
        "config/model.py",
        "math.sqrt(self.width_ratio)",
        "self.width_ratio",
        "test_mup.py::test_the_last_norm_starts_at_the_ratio",
    ),
    Mutation(
        "clipped-one-by-one",
        "optim.py",
        "optax.clip_by_global_norm(config.grad_clip)",
        "optax.clip(config.grad_clip)",
        "test_optim.py::test_clipping_bounds_what_the_optimiser_sees",
    ),
    Mutation(
        "muon-without-schedule",
        "optim.py",
        "lambda step: config.muon_learning_rate * relative(step)",
        "config.muon_learning_rate",
        "test_optim.py::test_muon_is_its_formula",
    ),
    Mutation(
        "muon-momentum-ignored",
        "optim.py",
        "beta=config.momentum",
        "beta=0.5",
        "test_optim.py::test_muon_is_its_formula",
    ),
    Mutation(
        "muon-axes-swapped",
        "optim.py",
        "reduction_axis=-2, output_axis=-1",
        "reduction_axis=-1, output_axis=-2",
        "test_optim.py::test_muon_is_its_formula",
    ),
    Mutation(
        "muon-does-not-decay",
        "optim.py",
        "beta=config.momentum,\n        weight_decay=config.weight_decay",
        "beta=config.momentum,\n        weight_decay=0.0",
        "test_optim.py::test_weight_decay_is_on_matrices_only[muon-False]",
    ),
    Mutation(
        "muon-without-adapters",
        "optim.py",
        '("kernel", "lora_a", "lora_b")',
        '("kernel",)',
        "test_optim.py::test_muon_has_the_blocks_matrices_and_nothing_else",
    ),
    Mutation(
        "muon-without-the-encoder",
        "optim.py",
        '("h", "encoder")',
        '("h",)',
        "encdec/test_encoder.py::test_muon_takes_the_encoders_matrices",
    ),
    # The schedules
    Mutation(
        "warm-up-from-zero",
        "optim.py",
        "optax.linear_schedule(1.0 / (warmup + 1), 1.0, warmup)",
        "optax.linear_schedule(0.0, 1.0, warmup)",
        "test_optim.py::test_warm_up_is_linear_and_never_zero",
    ),
    Mutation(
        "warm-up-one-step-longer",
        "optim.py",
        "[ramp, after], [warmup]",
        "[ramp, after], [warmup + 1]",
        "test_optim.py::test_cosine",
    ),
    Mutation(
        "cosine-over-all-steps",
        "optim.py",
        "cosine_decay_schedule(1.0, rest",
        "cosine_decay_schedule(1.0, steps",
        "test_optim.py::test_cosine",
    ),
    Mutation(
        "wsd-to-zero",
        "optim.py",
        "optax.linear_schedule(1.0, low, decay",
        "optax.linear_schedule(1.0, 0.0, decay",
        "test_optim.py::test_warmup_stable_decay",
    ),
    Mutation(
        "wsd-decays-a-share-of-what-is-left",
        "optim.py",
        "round(steps * config.decay_fraction)",
        "round(rest * config.decay_fraction)",
        "test_optim.py::test_warmup_stable_decay",
    ),
    Mutation(
        "inverse-square-root-one-step-off",
        "optim.py",
        "(warmup + 1 + step)",
        "(warmup + 2 + step)",
        "encdec/test_encoder.py::test_the_schedule_of_2017",
    ),
    # Attention
    Mutation(
        "scores-over-the-width",
        "layers/kernels/plain.py",
        "scale = H**-0.5 if scale is None else scale\n    G",
        "scale = (N * H) ** -0.5 if scale is None else scale\n    G",
        "layers/test_attention.py::test_every_kernel_equals_the_naive_one[plain-how0]",
    ),
    Mutation(
        "window-one-too-wide",
        "layers/kernels/plain.py",
        "bool), 1 - window)",
        "bool), -window)",
        "layers/test_attention.py::test_every_kernel_equals_the_naive_one[plain-how1]",
    ),
    Mutation(
        "block-leaves-out-a-key",
        "layers/kernels/plain.py",
        "start + 1 - window",
        "start + 2 - window",
        "layers/test_attention.py::test_blocks_of_queries_equal_the_whole_square[how1]",
    ),
    Mutation(
        "documents-of-the-first-block",
        "layers/kernels/plain.py",
        "visible_BTS[:, start:end, read]",
        "visible_BTS[:, : end - start, : read.stop - read.start]",
        "layers/test_attention.py::test_blocks_of_queries_equal_the_whole_square[how3]",
    ),
    Mutation(
        "dropped-weights-unscaled",
        "layers/kernels/plain.py",
        "weights_MQS / (1.0 - dropout)",
        "weights_MQS",
        "layers/test_attention.py::test_dropped_weights_keep_their_expectation[256]",
    ),
    Mutation(
        "query-scale-without-its-root",
        "config/model.py",
        "c.query_scale**-0.5",
        "1.0 / c.query_scale",
        "hf/test_parity.py::test_logits_and_greedy_text_are_transformers[gemma2]",
    ),
    Mutation(
        "global-layers-come-first",
        "config/model.py",
        "(layer + 1) % self.global_every",
        "layer % self.global_every",
        "hf/test_parity.py::test_logits_and_greedy_text_are_transformers[gemma3]",
    ),
    Mutation(
        "local-wavelengths-everywhere",
        "config/model.py",
        "if window is not None and self.rope_local_theta",
        "if self.rope_local_theta",
        "hf/test_parity.py::test_logits_and_greedy_text_are_transformers[gemma3]",
    ),
    # Positions
    Mutation(
        "rope-turns-back",
        "layers/position.py",
        "[x1 * cos - x2 * sin, x2 * cos + x1 * sin]",
        "[x1 * cos + x2 * sin, x2 * cos - x1 * sin]",
        "layers/test_position.py::test_rope_turns_complex_numbers",
    ),
    Mutation(
        "rope-turns-neighbours",
        "layers/position.py",
        "x1, x2 = jnp.split(turned.astype(jnp.float32), 2, axis=-1)",
        "x1, x2 = turned[..., ::2].astype(jnp.float32), turned[..., 1::2].astype(jnp.float32)",
        "layers/test_position.py::test_rope_turns_complex_numbers",
    ),
    Mutation(
        "rope-wavelengths",
        "layers/position.py",
        "jnp.arange(half, dtype=jnp.float32) / half",
        "jnp.arange(half, dtype=jnp.float32) / self.size",
        "layers/test_position.py::test_rope_turns_complex_numbers",
    ),
    Mutation(
        "llama3-blend",
        "layers/position.py",
        "(turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)",
        "turns / self.high_freq_factor",
        "layers/test_position.py::test_scaling_for_longer_texts",
    ),
    Mutation(
        "linear-scaling-upside-down",
        "layers/position.py",
        "return frequency / self.factor",
        "return frequency * self.factor",
        "layers/test_position.py::test_scaling_for_longer_texts",
    ),
    Mutation(
        "positions-go-on-in-a-row",
        "layers/position.py",
        "jnp.where(first_BT, index_BT, 0)",
        "jnp.where(first_BT, 0, 0)",
        "test_segments.py::test_positions_start_anew",
    ),
    Mutation(
        "positions-by-column",
        "sample/state.py",
        "positions_B[:, None])",
        "positions_B.min() * jnp.ones_like(positions_B)[:, None])",
        "sample/test_generate.py::test_greedy_equals_recomputation_with_a_sliding_window[rope]",
    ),
    # The cache
    Mutation(
        "cached-window-one-too-wide",
        "sample/cache.py",
        "(behind_BTS < window) & (behind",
        "(behind_BTS <= window) & (behind",
        "sample/test_cache.py::test_what_is_visible_follows_from_the_position",
    ),
    Mutation(
        "layer-window-one-too-wide",
        "sample/cache.py",
        "min(window, index.context)",
        "min(window + 1, index.context)",
        "sample/test_cached.py::test_cached_equals_uncached[rope-sandwich-3-2-1.0-6]",
    ),
    Mutation(
        "cached-scores-uncapped",
        "sample/cache.py",
        "cap_scores(part.scores(q_BKQH) * scale, softcap)",
        "part.scores(q_BKQH) * scale",
        "sample/test_cached.py::test_cached_equals_uncached[rope-sandwich-3-2-1.0-6]",
    ),
    Mutation(
        "cached-scale-forgotten",
        "sample/cache.py",
        "scale = H**-0.5 if scale is None else scale\n        window",
        "scale = H**-0.5\n        window",
        "sample/test_cached.py::test_cached_equals_uncached[rope-output-4-True-heads-3.0]",
    ),
    Mutation(
        "cached-heads-in-another-order",
        "sample/cache.py",
        "q_BKQH = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)",
        "q_BKQH = q_BTNH.reshape(B, T, G, K, H).transpose(0, 3, 2, 1, 4).reshape(B, K, G * T, H)",
        "sample/test_cache.py::test_attention_over_a_cache_is_attention",
    ),
    Mutation(
        "cached-values-not-rescaled",
        "sample/cache.py",
        "weights * self.v_scale_BKS[:, :, None]",
        "weights * 1.0",
        "sample/test_cache.py::test_8_bits_change_attention_by_less_than_a_hundredth",
    ),
    Mutation(
        "source-padding-is-read",
        "encdec/model.py",
        "self.source_length_B[:, None] - 1, positions",
        "self.source_length_B[:, None] + 1, positions",
        "encdec/test_encoder.py::test_cached_equals_uncached[2017]",
    ),
    Mutation(
        "ring-one-slot-too-short",
        "sample/cache.py",
        "positions_BT % self.columns",
        "positions_BT % (self.columns - 1)",
        "sample/test_generate.py::test_greedy_equals_recomputation_with_a_sliding_window[rope]",
    ),
    Mutation(
        "restart-one-token-earlier",
        "sample/engine.py",
        "len(found.tokens) - max(",
        "len(found.tokens) - 1 - max(",
        "sample/test_generate.py::test_greedy_equals_recomputation_of_ragged_prompts_far_past_the_context[learned]",
    ),
    Mutation(
        "int8-of-seven-bits",
        "layers/linear.py",
        "axis=-1) / 127.0",
        "axis=-1) / 63.0",
        "sample/test_quantize.py::test_int8_is_off_by_at_most_half_a_step",
    ),
    # Norms, MLP, model
    Mutation(
        "layer-norm-eps-outside-the-root",
        "layers/norm.py",
        "jax.lax.rsqrt(variance + eps)",
        "1.0 / (jnp.sqrt(variance) + eps)",
        "layers/test_norm.py::test_eps_is_added_to_the_variance",
    ),
    Mutation(
        "rms-norm-eps-outside-the-root",
        "layers/norm.py",
        "jax.lax.rsqrt(mean_square + eps)",
        "1.0 / (jnp.sqrt(mean_square) + eps)",
        "layers/test_norm.py::test_eps_is_added_to_the_variance",
    ),
    Mutation(
        "offset-begins-at-two",
        "layers/norm.py",
        "self.first_scale - self.offset",
        "self.first_scale",
        "layers/test_norm.py::test_an_offset_changes_what_is_kept_and_not_what_is_computed",
    ),
    Mutation(
        "gate-and-hidden-swapped",
        "layers/mlp.py",
        'h_BTF = act(project(self.hidden, kernel_init=self.kernel_init, name="c_gate")(x_BTD)) * h_BTF',
        'h_BTF = project(self.hidden, kernel_init=self.kernel_init, name="c_gate")(x_BTD) * act(h_BTF)',
        "layers/test_mlp.py::test_the_formula[swiglu]",
    ),
    Mutation(
        "embeddings-not-dropped",
        "model.py",
        "self.drop(x_BTD.astype(self.dtype), deterministic=not train)",
        "self.drop(x_BTD.astype(self.dtype), deterministic=True)",
        "test_model.py::test_every_dropout_draws_its_own",
    ),
    Mutation(
        "scanned-layers-drop-alike",
        "model.py",
        '"dropout": True}',
        '"dropout": False}',
        "test_model.py::test_every_dropout_draws_its_own",
    ),
    Mutation(
        "embeddings-times-the-width",
        "model.py",
        "x_BTD * math.sqrt(c.n_embd)",
        "x_BTD * c.n_embd",
        "hf/test_parity.py::test_logits_and_greedy_text_are_transformers[gemma]",
    ),
    Mutation(
        "parallel-branches-in-series",
        "layers/block.py",
        "middle_BTD + feed(self.ln_2(x_BTD))",
        "middle_BTD + feed(self.ln_2(middle_BTD))",
        "hf/test_parity.py::test_logits_and_greedy_text_are_transformers[neox]",
    ),
    Mutation(
        "logits-uncapped-when-small",
        "model.py",
        "jnp.tanh(logits_BTV / c.logit_softcap)",
        "jnp.tanh(logits_BTV)",
        "hf/test_parity.py::test_logits_and_greedy_text_are_transformers[gemma2]",
    ),
    # GGUF
    Mutation(
        "llama-rotates-halves",
        "hf/family.py",
        "return x_K2RD.swapaxes(1, 2).reshape(theirs.shape)",
        "return theirs",
        "gguf/test_families.py::test_llama_rotates_neighbours",
    ),
    Mutation(
        "gemma-scales-without-one",
        "gguf/file.py",
        "_constant(x + 1)",
        "_constant(x)",
        "gguf/test_families.py::test_what_llama_cpp_wants_otherwise",
    ),
    Mutation(
        "bits-of-norms-forgotten",
        "gguf/file.py",
        "elements=x.reshape(shape)",
        "elements=(x + 1).reshape(shape) - 1",
        "gguf/test_families.py::test_a_model_comes_back_bit_for_bit[gemma]",
    ),
    Mutation(
        "unsupported-fields-written",
        "gguf/families.py",
        "    if differs:\n        raise",
        "    if not values:\n        raise",
        "gguf/test_families.py::test_what_llama_cpp_would_not_compute_is_refused",
    ),
    Mutation(
        "sizes-in-a-gguf-trusted",
        "gguf/file.py",
        "_count_bytes(shape, kind) > size",
        "_count_bytes(shape, kind) < 0",
        "gguf/test_file.py::test_damaged_headers_are_refused_in_a_line_and_little_memory",
    ),
    Mutation(
        "bytes-spelled-in-upper-case",
        "gguf/tokenizers.py",
        "{text[0]:02x}",
        "{text[0]:02X}",
        "gguf/test_tokenizers.py::test_bytes",
    ),
    Mutation(
        "scores-of-later-merges",
        "gguf/tokenizers.py",
        "ranks.setdefault(left + right, rank)",
        "ranks[left + right] = -rank",
        "gguf/test_tokenizers.py::test_bpe[unspaced]",
    ),
    Mutation(
        "missing-merges-written",
        "gguf/tokenizers.py",
        "if pair not in pairs and all(",
        "if pair in pairs and not all(",
        "gguf/test_tokenizers.py::test_what_llama_cpp_does_not_have",
    ),
    Mutation(
        "comma-ends-a-text",  # token 11 of GPT-2
        "gguf/tokenizers.py",
        "own = own or [*ends][:1]",
        "own = own or [11]",
        "gguf/test_tokenizers.py::test_a_tokenizer_begins_and_ends_texts_as_before",
    ),
    # Adapters
    Mutation(
        "adapters-not-over-their-rank",
        "lora.py",
        "config.alpha / config.rank * ",
        "config.alpha * ",
        "runs/test_pretrained.py::test_merged_equals_unmerged[apart]",
    ),
    Mutation(
        "adapters-begin-alike",
        "lora.py",
        "jax.random.fold_in(key, number)",
        "key",
        "test_lora.py::test_a_is_drawn_for_each_matrix_and_b_is_zero",
    ),
    Mutation(
        "adapters-begin-too-large",
        "lora.py",
        " / D**0.5",
        "",
        "test_lora.py::test_a_is_drawn_for_each_matrix_and_b_is_zero",
    ),
    Mutation(
        "a-is-zero-and-b-is-not",
        "lora.py",
        "(*path, A): a_DR, (*path, B): jnp.zeros((*layers, config.rank, F))",
        "(*path, A): 0 * a_DR, (*path, B): jnp.ones((*layers, config.rank, F))",
        "test_lora.py::test_a_is_drawn_for_each_matrix_and_b_is_zero",
    ),
    # Sampling
    Mutation(
        "top-k-drops-the-kth",
        "sample/filters.py",
        "order_BV < edge_B1",
        "order_BV <= edge_B1",
        "sample/test_filters.py::test_top_k_keeps_k",
    ),
    Mutation(
        "min-p-of-all",
        "sample/filters.py",
        "logits_BV.max(axis=-1, keepdims=True) + jnp.log(",
        "jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True) + jnp.log(",
        "sample/test_filters.py::test_min_p_is_its_definition",
    ),
    Mutation(
        "nucleus-without-its-edge",
        "sample/filters.py",
        "(bits_BV < edge_B1)",
        "(bits_BV <= edge_B1)",
        "sample/test_filters.py::test_the_nucleus_holds_p_and_is_minimal",
    ),
    Mutation(
        "penalty-turned-round",
        "sample/filters.py",
        "jnp.where(logits_BV > 0, logits_BV / penalty",
        "jnp.where(logits_BV < 0, logits_BV / penalty",
        "sample/test_filters.py::test_the_penalty_makes_seen_tokens_less_likely_and_no_other",
    ),
    Mutation(
        "one-draw-for-all-tokens",
        "sample/state.py",
        "jax.vmap(jax.random.fold_in)(rows.keys_B, rows.drawn_B)",
        "rows.keys_B",
        "sample/test_generate.py::test_equal_prompts_draw_differently",
    ),
    Mutation(
        "prompts-not-penalised",
        "sample/engine.py",
        "ids[ids < self.vocab_size]",
        "ids[:0]",
        "sample/test_generate.py::test_the_repetition_penalty_knows_prompt_and_text",
    ),
    Mutation(
        "filters-of-one-row-for-all",
        "sample/filters.py",
        "return jnp.asarray(value, dtype).reshape(-1, 1)",
        "return jnp.asarray(value, dtype).reshape(-1, 1)[:1]",
        "sample/test_filters.py::test_each_row_has_its_own_sampling_to_the_bit",
    ),
    Mutation(
        "prefixes-of-equal-length-are-equal",
        "sample/state.py",
        "digest + part_T.tobytes()",
        "digest + part_T[1:].tobytes()",
        "sample/test_engine.py::test_a_common_beginning_is_read_once_and_changes_no_bit",
    ),
    Mutation(
        "guesses-kept-by-p-alone",
        "sample/search.py",
        "u_G * q_GV[each, tokens_G] < p_RV",
        "u_G < p_RV",
        "sample/test_speculative.py::test_the_distribution_is_exact",
    ),
    Mutation(
        "rest-is-all-of-p",
        "sample/search.py",
        "jnp.where(is_rejected, q_GV[jnp.minimum(n, G - 1)], 0.0)",
        "0.0",
        "sample/test_speculative.py::test_the_distribution_is_exact",
    ),
    Mutation(
        "guess-past-the-table-failed",
        "sample/search.py",
        "is_rejected &= n < room",
        "pass",
        "sample/test_speculative.py::test_the_distribution_is_exact",
    ),
    Mutation(
        "guess-past-the-table-kept",
        "sample/search.py",
        "kept_G &= each < room",
        "pass",
        "sample/test_speculative.py::test_the_distribution_is_exact",
    ),
    Mutation(
        "nucleus-of-none",
        "sample/filters.py",
        "jnp.maximum(_per_row(p), jnp.finfo(jnp.float32).tiny)",
        "_per_row(p)",
        "sample/test_filters.py::test_the_nucleus_of_nothing_is_the_likeliest",
    ),
    Mutation(
        "drafted-samples-by-one-key",
        "run.py",
        "jax.random.fold_in(key, earlier) if earlier else key",
        "key",
        "test_session.py::test_drafted_samples_of_one_prompt_differ",
    ),
    Mutation(
        "beam-ends-with-the-longest-prompt",
        "sample/search.py",
        "np.minimum(room_B, max_new_tokens)",
        "np.full(len(room_B), min(*room_B, max_new_tokens))",
        "encdec/test_encoder.py::test_prompts_of_several_lengths_are_searched_together[rope]",
    ),
    Mutation(
        "answers-have-the-room-of-the-longest-prompt",
        "tools/evaluate/evaluate.py",
        "max(map(len, targets)) if beams is None else run.model.config.block_size",
        "run.model.config.block_size - (max(map(len, prompts)) if beams is None else 0)",
        "tools/evaluate/test_pairs.py::test_all_pairs_of_a_run_that_is_always_right_are_exact[None-False-256]",
    ),
    Mutation(
        "beam-length-without-the-stop",
        "sample/search.py",
        "over_length(stopping_BW, tokens, alpha)",
        "over_length(stopping_BW, tokens - 1, alpha)",
        "encdec/test_encoder.py::test_a_search_waits_for_a_longer_text_that_may_yet_win",
    ),
    Mutation(
        "beam-caches-stay",
        "sample/search.py",
        "lambda x: x[rows_R], cache.layers",
        "lambda x: x, cache.layers",
        "encdec/test_encoder.py::test_a_wide_search_finds_the_best_of_all_texts[False-0.6]",
    ),
    Mutation(
        "beam-ends-too-soon",
        "sample/search.py",
        "over_length(beams.logprob_BW[:, 0], limit_B + 1, alpha)",
        "over_length(beams.logprob_BW[:, 0], beams.count, alpha)",
        "encdec/test_encoder.py::test_a_search_waits_for_a_longer_text_that_may_yet_win",
    ),
    # Data
    Mutation(
        "targets-scored-twice",
        "data/pipeline.py",
        "max(block_size - stride if start else 0,",
        "max(0,",
        "data/test_pipeline.py::test_windows_of_any_stride_have_every_target_once_and_none_to_spare",
    ),
    Mutation(
        "prefix-is-scored",
        "data/pipeline.py",
        "prefix_length - 1 - start",
        "prefix_length - 2 - start",
        "tools/evaluate/test_evaluate.py::test_a_text_stands_after_the_tokens_that_its_tokenizer_begins_texts_with[prefix1]",
    ),
    Mutation(
        "held-out-document-trained-on",
        "data/dataset.py",
        "SPLITS[number >= train]",
        "SPLITS[number > train]",
        "data/test_pairs.py::test_prepared_and_split[byte]",
    ),
    Mutation(
        "answers-shifted",
        "data/conversations.py",
        "answers[1:], number",
        "answers[:-1], number",
        "data/test_conversations.py::test_every_conversation_once_an_epoch[0]",
    ),
    Mutation(
        "last-answer-one-token-short",
        "data/conversations.py",
        "last[-1] + 1 if len(last)",
        "last[-1] if len(last)",
        "data/test_conversations.py::test_a_conversation_ends_after_its_last_answer_that_fits",
    ),
    Mutation(
        "sources-all-numbered-one",
        "data/pairs.py",
        "source[there], source_segments[there] = before, number",
        "source[there], source_segments[there] = before, 1",
        "data/test_pairs.py::test_each_pair_once_an_epoch_and_whole[True]",
    ),
    # Evaluation and accounts
    Mutation(
        "bits-by-scored-tokens",
        "tools/evaluate/evaluate.py",
        "math.log(2) * (len(split) - held_out.prefix)",
        "math.log(2) * count",
        "tools/evaluate/test_evaluate.py::test_bits_are_counted_by_bytes_and_by_characters",
    ),
    Mutation(
        "scores-with-less-context",
        "sample/score.py",
        "stride = max(block_size // 2, 1)",
        "stride = max(3 * block_size // 4, 1)",
        "sample/test_score.py::test_each_token_given_those_before_it_and_at_least_half_a_window",
    ),
    Mutation(
        "error-of-a-share-without-its-root",
        "tools/evaluate/evaluate.py",
        "(share * (1 - share) / len(order)) ** 0.5",
        "share * (1 - share) / len(order)",
        "encdec/test_encoder.py::test_a_text_that_a_run_writes_is_exact",
    ),
    Mutation(
        "flops-of-the-untied-input-table",
        "parallel/device.py",
        "if not config.tie_embeddings and config.vocab_size is not None:",
        "if False:",
        "test_model.py::test_flops_by_hand",
    ),
    Mutation(
        "flops-of-adapters-as-of-all",
        "parallel/device.py",
        "4.0 if in_adapters else 6.0",
        "6.0",
        "test_model.py::test_flops_by_hand",
    ),
    Mutation(
        "flops-ignore-windows",
        "parallel/device.py",
        "config.window(layer) or config.block_size, config.block_size",
        "config.block_size, config.block_size",
        "test_model.py::test_flops_by_hand",
    ),
    Mutation(
        "flops-of-key-value-heads",
        "parallel/device.py",
        "2.0 * config.n_head",
        "2.0 * (config.n_kv_head or 1)",
        "test_model.py::test_flops_by_hand",
    ),
    Mutation(
        "flops-without-the-encoder",
        "parallel/device.py",
        "(config.n_encoder_layer + config.n_layer) * config.block_size",
        "0",
        "test_model.py::test_flops_by_hand",
    ),
    Mutation(
        "mfu-of-one-device",
        "runs/log.py",
        "limits.flops * len(devices)",
        "limits.flops",
        "runs/test_log.py::test_the_rate_and_the_mfu",
    ),
    Mutation(
        "rate-of-all-tokens-so-far",
        "runs/log.py",
        "(step - then) * self._tokens_per_step",
        "step * self._tokens_per_step",
        "runs/test_log.py::test_the_rate_and_the_mfu",
    ),
    Mutation(
        "pauses-count-as-work",
        "runs/log.py",
        "self._pauses += time.monotonic() - began",
        "pass",
        "runs/test_log.py::test_a_clock_goes_on_from_the_sessions_before_and_leaves_out_pauses",
    ),
    Mutation(
        "flipped-bits-are-restored",
        "runs/checkpoint.py",
        "if [size, digest] != stated[name]:",
        "if size != stated[name][0]:",
        "runs/test_checkpoint.py::test_every_flipped_bit_is_found_and_its_file_named",
    ),
    Mutation(
        "the-best-is-not-kept",
        "runs/checkpoint.py",
        "damaged - {best, *sorted(losses)[-self._keep_last :]}",
        "damaged - {*sorted(losses)[-self._keep_last :]}",
        "runs/test_checkpoint.py::test_what_is_kept",
    ),
    Mutation(
        "an-audit-accepts-any-number",
        "tools/replay.py",
        "or distance <= tolerance",
        "or distance >= tolerance",
        "tools/test_replay.py::test_what_was_changed_is_named_if_every_step_is_taken",
    ),
    # Memory and settings
    Mutation(
        "state-divided-by-the-devices",
        "parallel/device.py",
        "bytes_per_device(state) + activations",
        "bytes_per_device(state) // len(devices) + activations",
        "parallel/test_device.py::test_a_state_is_counted_as_it_is_placed",
    ),
    Mutation(
        "result-of-xla-attention-not-kept",
        "layers/kernels/fused.py",
        'out_BTNH if implementation == "cudnn" else save_in_remat(out_BTNH)',
        "out_BTNH",
        "test_model.py::test_remat_of_all_but_dots_keeps_what_attention_made",
    ),
    Mutation(
        "statistics-of-norms-not-kept",
        "layers/norm.py",
        "variance = save_in_remat(jnp.mean(jnp.square(centred), axis=-1, keepdims=True))",
        "variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)",
        "test_model.py::test_remat_of_all_but_dots_keeps_the_statistics_of_norms",
    ),
    Mutation(
        "result-of-cudnn-attention-not-kept",
        "layers/remat.py",
        "primitive.name.startswith(CUDNN_FORWARD)",
        "False",
        "test_model.py::test_remat_of_all_but_dots_keeps_what_cudnn_made",
    ),
    Mutation(
        "numbers-that-float32-cannot-hold",
        "config/validate.py",
        "not SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT",
        "False",
        "config/test_config.py::test_every_number_and_products_of_two_are_float32s",
    ),
    # The server
    Mutation(
        "equal-prompts-with-equal-draws",
        "serve/requests.py",
        "                earlier[ids, source] += 1\n",
        "",
        "serve/test_real.py::test_n_choices_are_the_samples_of_equal_prompts",
    ),
    Mutation(
        "stop-string-that-keeps-the-slot",
        "serve/responses.py",
        "scheduler.finish([row])  # a stop string, which the engine does not know\n",
        "pass\n",
        "serve/test_app.py::test_a_stop_string_ends_text_tokens_and_slot",
    ),
    Mutation(
        "tokens-after-a-stop-string",
        "serve/responses.py",
        "is_last = self.finish is not None and not self._detokenizer.stopped",
        "is_last = self.finish is not None",
        "serve/test_app.py::test_a_stop_string_ends_text_tokens_and_slot",
    ),
    Mutation(
        "queue-without-end",
        "serve/scheduler.py",
        "if len(self.waiting) + rows > self._limit + max(free, 0):",
        "if False:",
        "serve/test_guard.py::test_a_full_queue_answers_at_once",
    ),
    Mutation(
        "who-left-is-decoded",
        "serve/scheduler.py",
        "                        self._engine.cancel(slot)\n                        self._forget(slot)\n",
        "                        pass\n",
        "serve/test_guard.py::test_who_leaves_frees_the_slot_within_one_burst[True]",
    ),
    Mutation(
        "no-key-asked",
        "serve/server.py",
        "if self._key is not None and scope",
        "if False and scope",
        "serve/test_guard.py::test_a_key_is_needed_where_there_is_one",
    ),
    Mutation(
        "body-of-any-size",
        "serve/server.py",
        "if len(body) > LARGEST_BODY:",
        "if False:",
        "serve/test_guard.py::test_large_bodies_are_refused_by_their_length_and_while_they_are_read",
    ),
    Mutation(
        "origin-of-anybody",
        "serve/server.py",
        "if not is_read and origin is not None and",
        "if False and origin is not None and",
        "serve/test_guard.py::test_pages_of_others_may_not_post[null]",
    ),
    Mutation(
        "key-derived-after-the-warm-up",
        "serve/server.py",
        "    make_request(Row(",
        "    dict(row=Row(",
        "serve/test_real.py::test_nothing_is_compiled_after_the_warm_up",
    ),
    Mutation(
        "unknown-parameters-ignored",
        "serve/requests.py",
        "        if name not in hints:\n",
        "        if name not in hints:\n            continue\n",
        "serve/test_requests.py::test_bad_parameters_are_named",
    ),
    Mutation(
        "score-of-the-token-before",
        "sample/score.py",
        "tokens[:-1], tokens[1:]",
        "tokens[:-1], tokens[:-1]",
        "sample/test_score.py::test_each_token_given_those_before_it_and_at_least_half_a_window",
    ),
    # Several devices; each runs the strategies of eight, a minute or two
    Mutation(
        "pmap-mean-of-means",
        "parallel/pmap.py",
        "jax.lax.pmean(sums, AXIS)",
        "jax.lax.pmean(jax.tree.map(lambda x: x / sums[1], sums), AXIS)",
        "parallel/test_strategies.py::test_on_several_devices[quick_curves]",
    ),
    Mutation(
        "pmap-validation-averaged",
        "parallel/pmap.py",
        "jax.lax.psum(step(params, batch), AXIS)",
        "jax.lax.pmean(step(params, batch), AXIS)",
        "parallel/test_strategies.py::test_on_several_devices[quick_curves]",
    ),
    Mutation(
        "pmap-devices-drop-alike",
        "parallel/pmap.py",
        "key = jax.random.fold_in(key, jax.lax.axis_index(AXIS))",
        "pass",
        "parallel/test_strategies.py::test_on_several_devices[dropout]",
    ),
    Mutation(
        "mesh-devices-drop-alike",
        "parallel/mesh.py",
        "key = jax.random.fold_in(key, jax.lax.axis_index(MESH_AXES))",
        "pass",
        "parallel/test_strategies.py::test_on_several_devices[mesh]",
    ),
    Mutation(
        "mesh-heads-drop-alike",
        "parallel/mesh.py",
        "jax.lax.axis_index(MESH_AXES)",
        "jax.lax.axis_index(BATCH_SPEC[0])",
        "parallel/test_strategies.py::test_on_several_devices[mesh]",
    ),
    Mutation(
        "slices-interleaved",
        "parallel/mesh.py",
        "list(devices[start : start + size])",
        "list(devices[start // size :: slices])",
        "parallel/test_mesh.py::test_other_devices_are_in_blocks",
    ),
    Mutation(
        "slices-resume-over-several",
        "parallel/trainer.py",
        '{"data": slices, "fsdp": -1}',
        '{"data": 1, "fsdp": -1}',
        "parallel/test_mesh.py::test_a_mesh_is_resumed_on_other_slices",
    ),
    Mutation(
        "gather-between-slices-counts-its-operand",
        "tools/plan/hlo.py",
        'part.bytes * (len(slices) if kind == "all-gather" else 1)',
        "part.bytes",
        "tools/plan/test_hlo.py::test_transfers_between_slices",
    ),
    Mutation(
        "gpu-network-of-the-fullest-host",
        "tools/plan/plan.py",
        "min(on_host.values())",
        "max(on_host.values())",
        "tools/plan/test_collectives.py::test_nvlink_ends_at_the_host",
    ),
    Mutation(
        "plan-attention-without-its-mask",
        "tools/plan/hlo.py",
        'if "CAUSAL" in',
        'if "FULL" in',
        "tools/plan/test_hlo.py::test_cudnns_attention_states_its_shape",
    ),
    Mutation(
        "plan-kernels-that-state-their-flops-are-attention",
        "tools/plan/hlo.py",
        'target == "tpu_custom_call" and not stated',
        'target == "tpu_custom_call"',
        "tools/plan/test_hlo.py::test_a_tpus_text",
    ),
    Mutation(
        "plan-gpu-of-any-plugin",
        "tools/plan/topology.py",
        "if jaxlib not in versions.values():",
        "if not versions.values():",
        "tools/plan/test_gpu.py::test_the_plugin_that_is_not_there",
    ),
    # Interventions
    Mutation(
        "edits-forget-the-term",
        "interventions/model.py",
        "keep * x.astype(jnp.float32) + added",
        "keep * x.astype(jnp.float32)",
        "interventions/test_edits.py::test_edits_apply_in_their_order_at_their_positions",
    ),
    Mutation(
        "edits-stop-at-their-last-position",
        "interventions/model.py",
        "jnp.minimum(positions_BT, len(edits[part]) - 1)",
        "jnp.minimum(positions_BT, 0)",
        "interventions/test_edits.py::test_edits_apply_in_their_order_at_their_positions",
    ),
    Mutation(
        "edits-merged-in-reverse",
        "interventions/edits.py",
        "edit.keep * added[at] + np.broadcast_to(term, selected)",
        "added[at] + np.broadcast_to(term, selected)",
        "interventions/test_edits.py::test_edits_apply_in_their_order_at_their_positions",
    ),
    Mutation(
        "an-edit-of-a-position-reaches-later-ones",
        "interventions/edits.py",
        "positions.max() + 2",
        "positions.max() + 1",
        "interventions/test_edits.py::test_edits_apply_in_their_order_at_their_positions",
    ),
    Mutation(
        "pattern-without-its-group",
        "interventions/model.py",
        "q_BTNH.shape[2] // v_BSKH.shape[2], axis=2",
        "1, axis=2",
        "interventions/test_edits.py::test_nothing_changes_without_an_edit_or_with_what_was_there",
    ),
    Mutation(
        "jacobian-lens-transposed",
        "interventions/lens.py",
        '"lbtd,led->lbte"',
        '"lbtd,lde->lbte"',
        "interventions/test_lens.py::test_the_lenses_end_in_the_models_logits",
    ),
    Mutation(
        "jacobian-lens-counts-the-last-position",
        "interventions/lens.py",
        "(jnp.arange(T) < T - 1)",
        "(jnp.arange(T) < T)",
        "interventions/test_lens.py::test_the_jacobian_lens_is_the_mean_jacobian",
    ),
    Mutation(
        "probe-scored-on-the-rows-it-was-fitted-to",
        "interventions/lens.py",
        "logits_UC = z_UD[fitted:] @",
        "logits_UC = z_UD[: len(z_UD) - fitted] @",
        "interventions/test_lens.py::test_a_probe_finds_what_is_linear_and_scores_it_on_other_rows",
    ),
    Mutation(
        "induction-score-from-one-token-early",
        "interventions/analyses.py",
        "tokens_BT, period - 1, start=period)",
        "tokens_BT, period - 1, start=period - 1)",
        "interventions/test_analyses.py::test_scores_are_means_of_patterns",
    ),
    Mutation(
        "mean-of-an-ablation-with-padding",
        "interventions/analyses.py",
        "[:, :-1][mask].mean(axis=0)",
        "[:, :-1].mean(axis=(0, 1))",
        "interventions/test_analyses.py::test_each_part_is_as_if_ablated_by_hand",
    ),
    Mutation(
        "one-sided-interval",
        "statistics.py",
        "(1 + confidence) / 2",
        "confidence",
        "test_statistics.py::test_the_interval_holds_the_truth_as_often_as_it_says",
    ),
    Mutation(
        "each-hypothesis-at-the-whole-level",
        "statistics.py",
        "steps = level / np.arange(p.shape[-1], 0, -1)",
        "steps = np.full(p.shape[-1], level)",
        "tools/test_study.py::test_nothing_is_found_where_nothing_differs_and_two_standard_deviations_are[normal]",
    ),
    Mutation(
        "steps-after-the-first-that-is-not-rejected",
        "statistics.py",
        "np.minimum(steps, last)",
        "steps",
        "test_statistics.py::test_holm_rejects_in_steps",
    ),
    Mutation(
        "interval-of-another-level-than-the-verdict",
        "tools/study.py",
        "mean_interval(x, 1 - level)",
        "mean_interval(x)",
        "tools/test_study.py::test_an_interval_excludes_zero_exactly_if_the_verdict_is_better_or_worse",
    ),
    Mutation(
        "a-run-that-failed-is-averaged",
        "tools/study.py",
        "DISAGREEMENT = 0.1 ",
        "DISAGREEMENT = 1e9 ",
        "tools/test_study.py::test_verdicts",
    ),
    Mutation(
        "finalists-with-the-seed-that-selected-them",
        "tools/sweep.py",
        "range(train.seed + 1, train.seed + 1 + sweep.seeds)",
        "range(train.seed, train.seed + sweep.seeds)",
        "tools/test_sweep.py::test_a_third_survives_to_three_times_the_steps",
    ),
    Mutation(
        "warm-up-of-short-runs-not-in-proportion",
        "tools/sweep.py",
        "-(-warmup * steps // experiment.train.steps)",
        "min(warmup, steps)",
        "tools/test_sweep.py::test_a_short_run_has_a_complete_schedule",
    ),
    Mutation(
        "diverged-seeds-left-out-of-a-mean",
        "tools/sweep.py",
        "if len(finite) == len(self.losses[-1]) else math.inf",
        "if finite else math.inf",
        "tools/test_sweep.py::test_a_diverged_run_is_last",
    ),
    Mutation(
        "source-without-false-fields",
        "config/serialize.py",
        "            if value != default:",
        "            if value:",
        "config/test_config.py::test_python_and_back_is_the_identity",
    ),
    Mutation(
        "scaling-squares-for-huber",
        "../experiments/scaling_laws.py",
        'loss="huber"',
        'loss="linear"',
        "test_scaling_laws.py::test_the_fit_reaches_the_minimum_of_lbfgs",
    ),
    Mutation(
        "scaling-prediction-of-other-points",
        "../experiments/scaling_laws.py",
        'prediction.get("points_sha256") != hash_points(points)',
        "False",
        "test_scaling_laws.py::test_a_prediction_is_made_once",
    ),
    Mutation(
        "scaling-test-repeats-its-data",
        "../experiments/scaling_laws.py",
        "if tokens <= MOST_EPOCHS * plan.data_tokens:",
        "if True:",
        "test_scaling_laws.py::test_a_ladder_predicts_its_test_run_and_is_not_trained_twice",
    ),
    Mutation(
        "scaling-ladder-repeats-its-data",
        "../experiments/scaling_laws.py",
        "min(longest_horizon(speeds, budget), data_tokens)",
        "longest_horizon(speeds, budget)",
        "test_scaling_laws.py::test_a_ladder_predicts_its_test_run_and_is_not_trained_twice",
    ),
    Mutation(
        "scaling-another-plan",
        "../experiments/scaling_laws.py",
        "    if changed:",
        "    if False:",
        "test_scaling_laws.py::test_a_ladder_predicts_its_test_run_and_is_not_trained_twice",
    ),
    Mutation(
        "scaling-one-rate-for-all-widths",
        "../experiments/scaling_laws.py",
        "model.mup_base_width or model.n_embd",
        "None",
        "test_scaling_laws.py::test_sizes_have_heads_of_one_size_and_whole_dimensions",
    ),
    Mutation(
        "scaling-plan-without-its-test",
        "../experiments/scaling_laws.py",
        "per_token + TEST_COMPUTE * speeds[-1].per_token",
        "per_token",
        "test_scaling_laws.py::test_more_minutes_give_a_larger_ladder_that_fits_and_then_more_seeds",
    ),
    Mutation(
        "scaling-starts-not-compared",
        "../experiments/scaling_laws.py",
        "to_law(min(found",
        "to_law(max(found",
        "test_scaling_laws.py::test_the_fit_reaches_the_minimum_of_lbfgs",
    ),
)


def stale(mutations: Iterable[Mutation]) -> Iterator[str]:
    """Yield what no longer fits the tree: a line that is not there once, a test that does not exist."""
    for m in mutations:
        if (count := (REPOSITORY / "jaxgpt" / m.file).read_text().count(m.old)) != 1:
            yield f"{m.name}: jaxgpt/{m.file} has {m.old!r} {count} times, needs it once"
        path, name = m.test.split("[")[0].split("::")
        if name not in _functions(REPOSITORY / "tests" / path):
            yield f"{m.name}: there is no tests/{m.test}"


@functools.cache
def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def _not_copied(directory: str, names: list[str]) -> list[str]:
    """Return what a copy of the repository does without: its history, caches, and runs, but not the package's `runs`."""
    return [n for n in names if n in (".git", "__pycache__") or (n == "runs" and Path(directory) == REPOSITORY)]


def run(tests: Iterable[str], broken: Mutation | None = None) -> tuple[int, float, str]:
    """Run tests in a copy of the repository -> (pytest's exit status, seconds, its output)."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "repository"
        shutil.copytree(REPOSITORY, copy, ignore=_not_copied)
        if broken is not None:
            path = copy / "jaxgpt" / broken.file
            path.write_text(path.read_text().replace(broken.old, broken.new))
        began = time.monotonic()
        pytest = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider"]
            + [f"tests/{test}" for test in tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that what the tests start ends with them
        )
        try:
            output, _ = pytest.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(pytest.pid, signal.SIGKILL)
            output, _ = pytest.communicate()
        return pytest.returncode, time.monotonic() - began, output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[m.name for m in MUTATIONS])
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if arguments.only is None or m.name in arguments.only]
    if problems := list(stale(chosen)):
        print("\n".join(problems))
        return 1
    if arguments.list:
        for m in chosen:
            print(f"{m.name} ({m.file}): {m.old!r} -> {m.new!r}\n    {m.test}")
        return 0

    status, seconds, output = run(sorted({m.test for m in chosen}))
    print(f"unbroken: {'all pass' if status == PASSED else output} ({seconds:.0f} s)", flush=True)
    if status != PASSED:
        return 1
    survived = []
    for m in chosen:
        status, seconds, output = run([m.test], m)
        said = {PASSED: "SURVIVED", FAILED: "killed"}.get(status, f"pytest ended with status {status}:\n{output}\n")
        print(f"{m.name}: {said} ({seconds:.0f} s)", flush=True)
        survived += [m.name] * (status != FAILED)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} were killed" + "".join(f"\nnot {name}" for name in survived))
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
