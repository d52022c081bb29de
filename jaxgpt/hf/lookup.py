"""Which family a config.json is of, and which family has an architecture of ours."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.hf.families import FAMILIES
from jaxgpt.hf.family import Family
from jaxgpt.hf.rotations import SCALINGS

# Fields for training, which do not change what the parameters compute; and those that `canonical_form` has otherwise.
TRAINING = ("dropout", "residual_init", "scan_layers", "remat")
BY_LAYER = ("sliding_window", "global_every")


def get_family(hf: dict[str, Any]) -> Family:
    """Return the family of a config.json. Raises `UserError` if it is not one of ours, or quantised."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        close = difflib.get_close_matches(kind, FAMILIES, n=1) if isinstance(kind, str) else []
        near = f" (near: {close[0]})" if close else ""
        raise UserError(f"model_type={short(kind)} is unknown{near}: known are {', '.join(FAMILIES)}")
    if hf.get("quantization_config") is not None:
        raise UserError("its weights are quantised (quantization_config): import those that are not")
    return FAMILIES[kind]


def find_family(config: GPTConfig, wanted: str | None = None) -> Family:
    """Return a family that has this architecture, `wanted` if it does. Raises `UserError` if none does."""
    ours, missing = canonical_form(config), {}
    for family in sorted(FAMILIES.values(), key=lambda family: family.model_type != wanted):
        try:
            theirs = canonical_form(family.read(family.write(config)))
        except UserError:  # far from that family
            continue
        differs = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
        if not differs:
            return family
        missing[family.model_type] = sorted(f"{name}={getattr(config, name, ours.get(name))}" for name in differs)
    nearest = min(missing, key=lambda name: len(missing[name]))
    raise UserError(
        f"no family on the Hub has a model like this one. The nearest, {nearest}, cannot be {', '.join(missing[nearest])}"
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
