"""What XLA on CPU computes is right, within rounding: see `tests.canary`."""

import json

import jax
import jaxlib

from tests.canary import deviations, known_programs


def test_what_was_computed_wrongly_is_right():
    """Without the flag that `configure_jax` sets, each of them is wrong with jaxlib 0.10.2."""
    for program in known_programs():
        found, count = deviations(program)
        where = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}: differs from float64 by more than rounding"
        assert not found and count, "\n".join([where, *map(json.dumps, found)])
