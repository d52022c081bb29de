"""Names in parameter trees of earlier versions, where `lm_head` was an array, not a module with a `kernel`."""

from typing import Any

import jax


def as_saved(tree: Any, saved: dict[str, str]) -> Any:
    """Return a tree, of parameters or an optimiser's state, with the names of a checkpoint. saved: its paths."""
    return _map_heads(tree, lambda head: head["kernel"] if isinstance(head, dict) else head) if _is_old(saved) else tree


def as_now(tree: Any, saved: dict[str, str]) -> Any:
    """Return a tree as it was restored from a checkpoint with the names that the model has now."""
    return _map_heads(tree, lambda head: {"kernel": head}) if _is_old(saved) else tree


def _is_old(saved: dict[str, str]) -> bool:
    return any(path.endswith("['lm_head']") for path in saved)


def _map_heads(tree: Any, convert: Any) -> Any:
    def has_head(x: Any) -> bool:
        return isinstance(x, dict) and "lm_head" in x

    return jax.tree.map(lambda x: x | {"lm_head": convert(x["lm_head"])} if has_head(x) else x, tree, is_leaf=has_head)
