"""Numbers that a user may give in many shapes."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config.validate import check_count, to_python
from jaxgpt.errors import UserError


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)], ids=repr)
def test_a_count_is_an_int_whatever_held_it(value):
    found = check_count("n", value)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize(
    "value, said",
    [
        (0, "n=0: needs at least 1"),
        (np.int32(-2), "n=-2: needs at least 1"),
        (2.5, "n=2.5: needs a whole number"),
        (2.0, "n=2.0: needs a whole number"),
        (np.float32(2), "n=2.0: needs a whole number"),
        (True, "n=True: needs a whole number"),
        (np.bool_(True), "n=True: needs a whole number"),
        (np.array([2]), r"n=array\(\[2\]\): needs a whole number"),
        ("2", "n='2': needs a whole number"),
        (None, "n=None: needs a whole number"),
        (11, "n=11: needs at most 10"),
        (10**4000, "needs at most 10"),
    ],
)
def test_what_is_no_count_is_told(value, said):
    with pytest.raises(UserError, match=said):
        check_count("n", value, high=10)


def test_only_scalars_are_changed():
    for value in (None, "a", b"a", (1,), [1], np.ones(2), object()):
        assert to_python(value) is value
