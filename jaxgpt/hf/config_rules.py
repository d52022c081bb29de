"""Rules that convert between `config.json` and `GPTConfig`, each in both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import LARGEST_COUNT, check_count, short
from jaxgpt.errors import UserError

Json = dict[str, Any]


class ConfigRule(NamedTuple):
    """Convert some keys of config.json to fields of `GPTConfig`, and back."""

    keys: tuple[str, ...]  # of config.json, those that `read` uses
    read: Callable[[Json], Json]  # config.json -> fields of GPTConfig
    write: Callable[[GPTConfig], Json] = lambda config: {}  # explicit GPTConfig -> keys of config.json


def required(**fields: str) -> ConfigRule:
    """Return the rule for fields whose key must be present. fields: GPTConfig's name -> key in config.json."""

    def read(hf: Json) -> Json:
        for key in fields.values():
            if hf.get(key) is None:
                raise UserError(f"it has no {key}")
        return {ours: hf[theirs] for ours, theirs in fields.items()}

    def write(config: GPTConfig) -> Json:
        return {theirs: getattr(config, ours) for ours, theirs in fields.items()}

    return ConfigRule(tuple(fields.values()), read, write)


def optional(ours: str, theirs: str, default: Any) -> ConfigRule:
    """Return the rule for one field and one key. default: the value in transformers if the key is absent."""
    return ConfigRule(
        (theirs,), lambda hf: {ours: hf.get(theirs, default)}, lambda config: {theirs: getattr(config, ours)}
    )


def always(**ours: Any) -> ConfigRule:
    """Return the rule for fields that have the same value in all models of a family, without a key."""
    return ConfigRule((), lambda hf: ours)


def never(**theirs: Any) -> ConfigRule:
    """Return the rule for keys that must be absent or have this value: our layers do not support any other."""

    def read(hf: Json) -> Json:
        for key, value in theirs.items():
            if hf.get(key, value) not in (value, None):
                raise UserError(f"{key}={short(hf[key])}: only {value!r} is supported")
        return {}

    return ConfigRule(tuple(theirs), read)


# Keys that transformers reads for any model, with the only values that our layers support.
CAUSAL_DECODER = never(
    is_causal=True,
    is_encoder_decoder=False,
    use_bidirectional_attention=False,
    add_cross_attention=False,
    attention_chunk_size=None,
    per_layer_config={},
    kv_sharing_modes=None,
    pruned_heads={},
)


def alias(theirs: str, key: str, default: Any = None) -> ConfigRule:
    """Return the rule for `theirs`, a second name of `key`: absent, or with the same value.

    default: the value of `key` if it is absent.
    """

    def read(hf: Json) -> Json:
        merge_agreeing({key: {key: hf.get(key, default)}, theirs: {key: hf.get(theirs)}})
        return {}

    return ConfigRule((theirs,), read)


def merge_agreeing(places: dict[str, Json]) -> Json:
    """Merge the values of several places, without None. Raises `UserError` if two of them differ in a key.

    places: name of each place, for the message -> its values.
    """
    found: Json = {}
    where: dict[str, str] = {}
    for place, values in places.items():
        for key, value in values.items():
            if value is None:
                continue
            if found.setdefault(key, value) != value:
                raise UserError(
                    f"conflicting {key}: {short(found[key])} in {where[key]}, {short(value)} in {place}. "
                    "Remove the wrong one."
                )
            where.setdefault(key, place)
    return found


def choice(ours: str, theirs: str, values: dict[str, str], default: str) -> ConfigRule:
    """Return the rule for a field whose values have other names in config.json.

    Args:
        ours: the field of `GPTConfig`.
        theirs: the key in config.json.
        values: their name -> ours. If several names mean the same, the first is written; null if none does.
        default: their name if the key is absent or null.
    """

    def read(hf: Json) -> Json:
        value = hf.get(theirs) or default
        if not isinstance(value, str) or value not in values:
            raise UserError(f"{theirs}={short(value)}: needs one of {', '.join(values)}")
        return {ours: values[value]}

    def write(config: GPTConfig) -> Json:
        value = getattr(config, ours)
        return {theirs: next((name for name, meant in values.items() if meant == value), None)}

    return ConfigRule((theirs,), read, write)


def attention_bias(default: bool = False) -> ConfigRule:
    """Return the rule for biases in all projections of attention, or in none."""
    return ConfigRule(
        ("attention_bias",),
        lambda hf: dict.fromkeys(("qkv_bias", "out_bias"), hf.get("attention_bias", default)),
        lambda config: {"attention_bias": bool(config.qkv_bias)},
    )


SIZES = required(
    vocab_size="vocab_size", n_embd="hidden_size", n_layer="num_hidden_layers", n_head="num_attention_heads"
)


def llama_config(
    *, tied: bool = False, eps: float = 1e-6, context: int = 2048, head_dim: int | None = None
) -> tuple[ConfigRule, ...]:
    """Return the rules that Llama and later families share. The arguments are defaults for absent keys."""
    return (
        SIZES,
        optional("n_kv_head", "num_key_value_heads", None),
        optional("head_dim", "head_dim", head_dim),
        required(mlp_dim="intermediate_size"),
        optional("block_size", "max_position_embeddings", context),
        optional("norm_eps", "rms_norm_eps", eps),
        optional("tie_embeddings", "tie_word_embeddings", tied),
        always(norm="rmsnorm", bias=False),
        CAUSAL_DECODER,
    )


SLIDING, FULL = "sliding_attention", "full_attention"


def read_count(hf: Json, key: str, default: int) -> int:
    """Return the number of layers under a key, checked."""
    return check_count(key, hf.get(key, default), 0, LARGEST_COUNT)


def _layer_types(hf: Json) -> list[str]:
    """Return `layer_types`, an empty list if it is absent."""
    kinds = hf.get("layer_types") or []
    if not isinstance(kinds, list) or not all(kind in (SLIDING, FULL) for kind in kinds):
        raise UserError(f"layer_types={short(kinds)}: needs a list of {SLIDING} and {FULL}")
    return kinds


def _window(hf: Json) -> int | None:
    return hf.get("sliding_window", 4096)


def no_window() -> ConfigRule:
    """Return the rule for full attention in every layer."""

    def read(hf: Json) -> Json:
        if hf.get("sliding_window") is not None or SLIDING in _layer_types(hf):
            raise UserError(
                f"sliding_window={short(hf.get('sliding_window'))} and layer_types={short(_layer_types(hf))}: this "
                "model_type has no sliding window, so remove both keys"
            )
        return {}

    return ConfigRule(("sliding_window", "layer_types"), read)


def window_everywhere() -> ConfigRule:
    """Return the rule of Mistral: a sliding window in all layers, or in none."""

    def read(hf: Json) -> Json:
        size, kinds = _window(hf), _layer_types(hf)
        if (SLIDING if size is None else FULL) in kinds:
            raise UserError(
                f"layer_types={short(kinds)} and sliding_window={short(size)}: in this model_type all layers "
                "have the window or none has, so remove layer_types"
            )
        return {"sliding_window": size}

    return ConfigRule(("sliding_window", "layer_types"), read, lambda config: {"sliding_window": config.sliding_window})


def windows(
    usual: Callable[[int, Json], bool],
    *,
    keys: tuple[str, ...] = (),
    size: Callable[[Json], int | None] = _window,
    **more: Callable[[GPTConfig], Any],
) -> ConfigRule:
    """Return the rule for `layer_types`, which lists the layers that have a sliding window.

    Args:
        usual: (layer, config.json) -> whether the layer has a window if there is no list.
        keys: further keys that `usual` and `size` read.
        size: config.json -> tokens of the window, or None for full attention.
        more: further keys to write, each with a function of the configuration.
    """

    def read(hf: Json) -> Json:
        layers, kinds = read_count(hf, "num_hidden_layers", 0), _layer_types(hf)
        slides = [kind == SLIDING for kind in kinds] if kinds else [usual(i, hf) for i in range(layers)]
        if len(slides) != layers:
            raise UserError(f"layer_types={short(kinds)}: needs {layers} entries, one per layer")
        if not any(slides):
            return {"sliding_window": None}
        if size(hf) is None:
            values = ", ".join(f"{key}={short(hf.get(key))}" for key in ("layer_types", "sliding_window", *keys))
            raise UserError(f"{values}: needs the size of a window, or no {SLIDING} layers")
        every = None if all(slides) else slides.index(False) + 1
        if slides != [every is None or bool((i + 1) % every) for i in range(layers)]:
            raise UserError("layer_types has no period: only every n-th layer can have full attention")
        return {"sliding_window": size(hf), "global_every": every}

    def write(config: GPTConfig) -> Json:
        kinds = [FULL if config.window(i) is None else SLIDING for i in range(config.n_layer)]
        return {
            "sliding_window": config.sliding_window,
            "layer_types": kinds,
            **{key: of(config) for key, of in more.items()},
        }

    return ConfigRule(("sliding_window", "layer_types", *keys), read, write)
