"""Which keys of a config.json we know."""

from __future__ import annotations

from typing import Any

from jaxgpt.hf.family import Family

# Keys of config.json that are nothing to the logits, in any family. A key that is not here, and that no aspect of its
# family reads, is one that we do not know.
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
    # What is written: tokens with a meaning, and how one is drawn.
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


def unknown_keys(family: Family, hf: dict[str, Any]) -> list[str]:
    """Return the keys of a config.json that we do not know, without those that are null or false."""
    known = IGNORED.union(*(aspect.keys for aspect in family.aspects))
    return sorted(key for key, value in hf.items() if key not in known and value not in (None, False))
