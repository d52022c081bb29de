"""A family of models: two tables, one for config.json and one for the tensors, each applied in both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator
from typing import Any

from jaxgpt.config import GPTConfig
from jaxgpt.hf.config_rules import ConfigRule
from jaxgpt.hf.weight_rules import WeightRule

# Keys of config.json that do not change the logits, in any family. A key that is not here, and that no rule of its
# family reads, is unknown.
IGNORED = frozenset(
    # What the file is, and how the weights are stored.
    "model_type architectures transformers_version dtype torch_dtype quantization_config name_or_path "
    "_name_or_path _commit_hash "
    # How it is computed: the same up to rounding.
    "attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal "
    "_experts_implementation _experts_implementation_internal chunk_size_feed_forward gradient_checkpointing "
    "pretraining_tp reorder_and_upcast_attn torchscript use_bfloat16 use_cache cache_implementation "
    # What else a call returns.
    "output_attentions output_hidden_states return_dict use_return_dict tie_last_hidden_states "
    # Training, and weights that are not there yet.
    "attention_dropout attn_pdrop embd_pdrop hidden_dropout initializer_range tie_encoder_decoder tf_legacy_loss "
    # Heads of classifiers.
    "classifier_dropout finetuning_task id2label label2id num_labels problem_type summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params "
    # What is written: tokens with a canonical_form, and how one is drawn.
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix tokenizer_class bad_words_ids "
    "begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values "
    "repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p "
    # Notes of other tools.
    "is_llama_config transformers.js_config unsloth_fixed unsloth_version "
    # Read by transformers in other families alone, or where layer_types is missing in other versions.
    "is_decoder cross_attention_hidden_size n_ctx _sliding_window_pattern".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    model_type: str  # transformers' name for it, in config.json
    architecture: str  # transformers' class
    prefix: str  # of all tensors but the output matrix; checkpoints of the bare body leave it out
    config_rules: tuple[ConfigRule, ...]
    weight_rules: tuple[WeightRule, ...]
    buffers: tuple[str, ...] = ()  # ends of names of tensors that are not weights: older checkpoints have them

    def read(self, hf: dict[str, Any]) -> GPTConfig:
        """Return the architecture that a config.json describes. Raises `UserError` for what our layers cannot be."""
        fields: dict[str, Any] = {}
        for rule in self.config_rules:
            fields |= rule.read(hf)
        if fields.get("sliding_window") is None:  # there are no layers with rotations of their own
            fields.pop("rope_local_theta", None)
        return GPTConfig(**fields)

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Return the config.json of an architecture, without what concerns the tokenizer."""
        hf: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.architecture]}
        for rule in self.config_rules:
            hf |= rule.write(config.explicit())
        return hf

    def unknown_keys(self, hf: dict[str, Any]) -> list[str]:
        """Return the keys of a config.json that are unknown, without those that are null or false."""
        known = IGNORED.union(*(rule.keys for rule in self.config_rules))
        return sorted(key for key, value in hf.items() if key not in known and value not in (None, False))

    def expand_rules(self, config: GPTConfig, paths: Container[str]) -> Iterator[WeightRule]:
        """Yield the rules of this model's parameters, layer by layer. paths: of our parameters."""
        for rule in self.weight_rules:
            for layer in range(config.n_layer) if "{}" in rule.theirs else (0,):
                ours = tuple(path.format(layer) for path in rule.ours)
                if ours[0] in paths:
                    yield WeightRule(ours, rule.theirs.format(layer), rule.layout)
