"""Describe a model family by rules for config.json and for the tensors, which apply in both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxgpt.config import GPTConfig
from jaxgpt.hf.config_rules import SCALINGS, ConfigRule

EMBEDDING, HEAD = ("wte/embedding",), ("lm_head/kernel",)  # paths of the parameters that are one if embeddings are tied

# Layout of the elements in a file. same: as ours. columns: parts concatenated along the last axis (GPT-2's Conv1D). rows:
# parts transposed to [out, in], where ours is [in, out], and concatenated. heads: as rows, but the parts of the first head,
# those of the second, ... (GPT-NeoX). pairs: as rows, but in each head the elements that rotate together are neighbours,
# which here are half a head apart (Llama in GGUF).
Layout = Literal["same", "columns", "rows", "heads", "pairs"]


class WeightRule(NamedTuple):
    """Map one tensor of a file to the parameters that it holds. "{}" is the index of the layer."""

    ours: tuple[str, ...]  # "h_{}/attn/q/kernel"
    theirs: str  # "model.layers.{}.self_attn.q_proj.weight"
    layout: Layout = "same"


def weight_rules(
    top: dict[str, str],
    layer: str,
    inside: dict[str, str],
    *,
    matrices: Layout = "rows",
    fused: Layout = "rows",
    rotated: Layout = "rows",
) -> tuple[WeightRule, ...]:
    """Return the rules for all tensors, from the names of modules.

    Args:
        top: the path of our module -> theirs, outside of the layers.
        layer: the prefix of their names in a layer.
        inside: the path of our module in a layer -> theirs after the prefix. attn/qkv: q, k and v share a tensor.
        matrices: layout of linear layers.
        fused: layout of attn/qkv.
        rotated: layout of attn/q and attn/k.
    """
    rules = []
    for ours, theirs in (top | {f"h_{{}}/{ours}": f"{layer}.{theirs}" for ours, theirs in inside.items()}).items():
        place, _, last = ours.rpartition("/")
        if last in ("wte", "wpe"):
            rules.append(WeightRule((f"{last}/embedding",), f"{theirs}.weight"))
        elif last == "lm_head":
            rules.append(WeightRule(HEAD, f"{theirs}.weight", "rows"))
        elif last.startswith("ln_") or last.endswith("_norm"):
            rules += [WeightRule((f"{ours}/{x}",), f"{theirs}.{y}") for x, y in (("scale", "weight"), ("bias", "bias"))]
        else:
            layout = {"qkv": fused, "q": rotated, "k": rotated}.get(last, matrices)
            paths = [f"{place}/{x}" for x in "qkv"] if last == "qkv" else [ours]
            for x, y in (("kernel", "weight"), ("bias", "bias")):
                rules.append(WeightRule(tuple(f"{path}/{x}" for path in paths), f"{theirs}.{y}", layout))
    return tuple(rules)


def split(theirs: np.ndarray, count: int, layout: Layout, head_dim: int) -> list[np.ndarray]:
    """Split a tensor of a file into `count` of our arrays, views where possible. head_dim: elements per head."""
    if layout == "same":
        return [theirs]
    if layout == "columns":
        return np.split(theirs, count, axis=-1)
    if layout in ("heads", "pairs"):
        parts = (count, head_dim) if layout == "heads" else (head_dim // 2, 2)
        theirs = theirs.reshape(-1, *parts, *theirs.shape[1:])
        axes = (0, 1) if layout == "heads" else (1, 2)
        theirs = theirs.swapaxes(*axes).reshape(-1, *theirs.shape[3:])
    return [x.T for x in np.split(theirs, count)]


def join(ours: Sequence[np.ndarray], layout: Layout, head_dim: int) -> np.ndarray:
    """Join our arrays into the tensor of a file, the inverse of `split`."""
    if layout == "same":
        return ours[0]
    if layout == "columns":
        return np.concatenate(ours, axis=-1)
    theirs = np.concatenate([x.T for x in ours])
    if layout == "heads":
        x_3NHD = theirs.reshape(len(ours), -1, head_dim, *theirs.shape[1:])
        return x_3NHD.swapaxes(0, 1).reshape(theirs.shape)
    if layout == "pairs":
        x_K2RD = theirs.reshape(-1, 2, head_dim // 2, *theirs.shape[1:])
        return x_K2RD.swapaxes(1, 2).reshape(theirs.shape)
    return theirs


def their_shape(ours: Sequence[tuple[int, ...]], layout: Layout) -> tuple[int, ...]:
    """Return the shape of the tensor that `join` makes of arrays with these shapes."""
    inputs, outputs = ours[0][:-1], sum(shape[-1] for shape in ours)
    return (*inputs, outputs) if layout in ("same", "columns") else (outputs, *inputs)


# Keys of config.json that do not change the logits in any family. A key is unknown if it is not here and no rule of its
# family reads it.
IGNORED = frozenset(
    # File and storage.
    "model_type architectures transformers_version dtype torch_dtype quantization_config name_or_path "
    "_name_or_path _commit_hash "
    # Implementation: the same result up to rounding.
    "attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal "
    "_experts_implementation _experts_implementation_internal chunk_size_feed_forward gradient_checkpointing "
    "pretraining_tp reorder_and_upcast_attn torchscript use_bfloat16 use_cache cache_implementation "
    # Further outputs of a call.
    "output_attentions output_hidden_states return_dict use_return_dict tie_last_hidden_states "
    # Training and initialisation.
    "attention_dropout attn_pdrop embd_pdrop hidden_dropout initializer_range tie_encoder_decoder tf_legacy_loss "
    # Classification heads.
    "classifier_dropout finetuning_task id2label label2id num_labels problem_type summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params "
    # Special tokens and sampling.
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix tokenizer_class bad_words_ids "
    "begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values "
    "repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p "
    # Notes of other tools.
    "is_llama_config transformers.js_config unsloth_fixed unsloth_version "
    # Read by transformers only in other families, or in other versions if layer_types is absent.
    "is_decoder cross_attention_hidden_size n_ctx _sliding_window_pattern".split()
)
# Fields that only matter in training, and fields that `canonical_form` replaces by a list over the layers.
TRAINING = ("dropout", "residual_init", "mup_base_width", "scan_layers", "remat")
BY_LAYER = ("sliding_window", "global_every")
# Parts of the canonical form that are not fields, with the fields that decide them.
PARTS = {
    "windows": BY_LAYER,
    "rope": ("rope_theta", "rope_scaling", "rope_factor", "rope_local_theta"),
    "rope_size": ("rope_fraction",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model family in a format: its names, and the rules for the configuration and for the tensors."""

    model_type: str  # transformers' name for it, in config.json
    architecture: str | None = None  # transformers' class. None: another format, whose configuration has neither name
    prefix: str = ""  # of all tensors except the output matrix; absent in checkpoints of the base model
    config_rules: tuple[ConfigRule, ...]
    weight_rules: tuple[WeightRule, ...]

    def read(self, hf: dict[str, Any]) -> GPTConfig:
        """Return the architecture that a config.json describes. Raises `UserError` if our layers do not support it."""
        fields: dict[str, Any] = {}
        for rule in self.config_rules:
            fields |= rule.read(hf)
        if fields.get("sliding_window") is None:  # no layer has the local rotation
            fields.pop("rope_local_theta", None)
        return GPTConfig(**fields)

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Return the config.json of an architecture, without the keys of the tokenizer."""
        hf: dict[str, Any] = {}
        if self.architecture is not None:
            hf |= {"model_type": self.model_type, "architectures": [self.architecture]}
        for rule in self.config_rules:
            hf |= rule.write(config.explicit())
        return hf

    def unknown_keys(self, hf: dict[str, Any]) -> list[str]:
        """Return the unknown keys of a config.json, except those that are null or false."""
        known = IGNORED.union(*(rule.keys for rule in self.config_rules))
        return sorted(key for key, value in hf.items() if key not in known and value not in (None, False))

    def expand_rules(self, config: GPTConfig, paths: Container[str]) -> Iterator[WeightRule]:
        """Yield the rule of each tensor of a model, with layer indices filled in.

        paths: paths of the model's parameters; rules for others are skipped.
        """
        for rule in self.weight_rules:
            for layer in range(config.n_layer) if "{}" in rule.theirs else (0,):
                ours = tuple(path.format(layer) for path in rule.ours)
                if ours[0] in paths:
                    yield WeightRule(ours, rule.theirs.format(layer), rule.layout)


def canonical_form(config: GPTConfig) -> dict[str, Any]:
    """Return all that determines the logits: configurations with equal forms describe the same model."""
    c = config.explicit()
    form = {
        name: value
        for name, value in dataclasses.asdict(c).items()
        if name not in TRAINING + BY_LAYER and not name.startswith("rope_")
    }
    form["windows"] = [c.window(i) for i in range(c.n_layer)]
    if c.position == "rope":
        assert c.head_dim
        scaling = "none" if c.rope_scaling == "linear" and c.rope_factor == 1.0 else c.rope_scaling
        factors = () if scaling == "none" else (float(getattr(c, ours)) for ours in SCALINGS[scaling].values())
        usual = (float(c.rope_theta), scaling, *factors)
        local = usual if c.rope_local_theta is None else (float(c.rope_local_theta), "none")
        form["rope_size"] = int(c.head_dim * c.rope_fraction)
        form["rope"] = [usual if window is None else local for window in form["windows"]]
    if not c.qk_norm:
        del form["qk_norm_over"]
    return form


def find_differences(config: GPTConfig, other: GPTConfig) -> list[str]:
    """Return "name=value" of the fields, sorted, by which `other` describes another model than `config`."""
    ours, theirs = canonical_form(config), canonical_form(other)
    fields: list[str] = []
    for part in ours.keys() | theirs.keys():
        if ours.get(part) != theirs.get(part):
            names = PARTS.get(part, (part,))
            fields += [n for n in names if getattr(config, n) != getattr(GPTConfig, n)] or names
    return sorted(f"{name}={getattr(config, name)}" for name in fields)
