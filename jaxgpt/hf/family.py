"""A family of models: two tables, one for config.json and one for the tensors, each applied in both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxgpt.config import GPTConfig
from jaxgpt.hf.config_rules import ConfigRule
from jaxgpt.hf.rotations import SCALINGS

# How the elements lie. same: alike. transposed: [out, in] there, [in, out] here. columns: q, k and v side by side along
# the last axis, as GPT-2's Conv1D has them. heads: q, k and v of the first head, then of the second, ..., as GPT-NeoX.
Layout = Literal["same", "transposed", "columns", "heads"]


class WeightRule(NamedTuple):
    """One of their tensors, and the one or several parameters of ours that it holds. "{}" is the layer's number."""

    ours: tuple[str, ...]  # "h_{}/attn/q/kernel"
    theirs: str  # "model.layers.{}.self_attn.q_proj.weight"
    layout: Layout = "same"


def linear(ours: str, theirs: str, layout: Layout = "transposed") -> list[WeightRule]:
    return [
        WeightRule((f"{ours}/kernel",), f"{theirs}.weight", layout),
        WeightRule((f"{ours}/bias",), f"{theirs}.bias"),
    ]


def qkv(theirs: str, layout: Layout) -> list[WeightRule]:
    """Return the rules of queries, keys and values in one tensor."""
    parts = {"kernel": "weight", "bias": "bias"}
    return [WeightRule(tuple(f"h_{{}}/attn/{x}/{p}" for x in "qkv"), f"{theirs}.{t}", layout) for p, t in parts.items()]


def norm(ours: str, theirs: str) -> list[WeightRule]:
    return [WeightRule((f"{ours}/scale",), f"{theirs}.weight"), WeightRule((f"{ours}/bias",), f"{theirs}.bias")]


# Names of the norms of a layer, ours -> those of families with Llama's names.
PRE = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
OUTPUT = {"ln_1": "post_attention_layernorm", "ln_2": "post_feedforward_layernorm"}
SANDWICH = {
    "ln_1": "input_layernorm",
    "ln_1_out": "post_attention_layernorm",
    "ln_2": "pre_feedforward_layernorm",
    "ln_2_out": "post_feedforward_layernorm",
}


def split(theirs: np.ndarray, layout: Layout, n_head: int) -> list[np.ndarray]:
    """Return our arrays of their tensor; views where possible."""
    if layout == "transposed":
        return [theirs.T]
    if layout == "columns":
        return np.split(theirs, 3, axis=-1)
    if layout == "heads":
        x_N3HD = theirs.reshape(n_head, 3, -1, *theirs.shape[1:])
        parts = [x_N3HD[:, i].reshape(-1, *theirs.shape[1:]) for i in range(3)]
        return [x.T for x in parts] if theirs.ndim == 2 else parts
    return [theirs]


def join(ours: Sequence[np.ndarray], layout: Layout, n_head: int) -> np.ndarray:
    """Return their tensor of our arrays: the inverse of `split`."""
    if layout == "transposed":
        return ours[0].T
    if layout == "columns":
        return np.concatenate(ours, axis=-1)
    if layout == "heads":
        x_N3HD = np.stack([x.T.reshape(n_head, -1, *x.shape[:-1]) for x in ours], axis=1)
        return x_N3HD.reshape(-1, *x_N3HD.shape[3:])
    return ours[0]


def their_shape(ours: Sequence[tuple[int, ...]], layout: Layout) -> tuple[int, ...]:
    """Return the shape of their tensor, from the shapes of ours."""
    first = ours[0]
    if layout == "transposed":
        return first[::-1]
    if layout == "columns":
        return (*first[:-1], sum(shape[-1] for shape in ours))
    if layout == "heads":
        return (sum(shape[-1] for shape in ours), *first[:-1])
    return first


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
# Fields for training, which do not change what the parameters compute; and those that `canonical_form` has otherwise.
TRAINING = ("dropout", "residual_init", "scan_layers", "remat")
BY_LAYER = ("sliding_window", "global_every")


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


def llama_like(
    model_type: str,
    architecture: str,
    *config_rules: ConfigRule,
    norms: dict[str, str] = PRE,
    buffers: tuple[str, ...] = (),
) -> Family:
    """Return a family whose tensors have Llama's names. norms: of a layer."""
    layer = "model.layers.{}"
    rules = [
        WeightRule(("wte/embedding",), "model.embed_tokens.weight"),
        WeightRule(("lm_head",), "lm_head.weight", "transposed"),
        *norm("ln_f", "model.norm"),
    ]
    for ours, name in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "c_proj": "o_proj"}.items():
        rules += linear(f"h_{{}}/attn/{ours}", f"{layer}.self_attn.{name}")
    for name in ("q_norm", "k_norm"):
        rules += norm(f"h_{{}}/attn/{name}", f"{layer}.self_attn.{name}")
    for ours, name in {"c_gate": "gate_proj", "c_fc": "up_proj", "c_proj": "down_proj"}.items():
        rules += linear(f"h_{{}}/mlp/{ours}", f"{layer}.mlp.{name}")
    for ours, name in norms.items():
        rules += norm(f"h_{{}}/{ours}", f"{layer}.{name}")
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        config_rules=config_rules,
        weight_rules=tuple(rules),
        buffers=buffers,
    )


def canonical_form(config: GPTConfig) -> dict[str, Any]:
    """Return all that decides the logits, in one form: two configurations with equal forms are the same model."""
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
