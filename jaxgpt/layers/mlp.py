"""The position-wise feed-forward network: expand, apply a nonlinearity, project back."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.layers.linear import INIT_STD, Dense


def gelu(x: jax.Array) -> jax.Array:
    """Compute x Phi(x) by erf, as torch.nn.GELU(). Hendrycks and Gimpel 2016, arXiv:1606.08415.

    jax.nn.gelu uses erfc, which is accurate for large negative x, where this form rounds results below 1e-7 to 0. In
    float32 that saves 4% of a training step on CPU. In 16 bits the limit would be 1e-2.
    """
    if x.dtype != jnp.float32:
        return jax.nn.gelu(x, approximate=False)
    return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
#: Nonlinearities by name. GELU has both forms, since torch.nn.GELU() is by erf, and GPT-2 and jax.nn.gelu are by tanh.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, arXiv:2109.08668
    # activations of a gate: Shazeer 2020, arXiv:2002.05202
    "swiglu": jax.nn.silu,
    "geglu": gelu,
    "geglu_tanh": gelu_tanh,
}


class MLP(nn.Module):
    """x_BTD -> x_BTD, each token separately: `c_proj(act(c_fc(x)))`, or gated `c_proj(act(c_gate(x)) * c_fc(x))`."""

    hidden: int  # number of hidden units, F
    activation: str = "gelu_tanh"  # name of the nonlinearity: a key of `ACTIVATIONS`. With glu in it there is a gate
    function: Callable[[jax.Array], jax.Array] | None = None  # the nonlinearity. None means the one with that name
    use_bias: bool = True  # the layers have biases
    dropout: float = 0.0  # dropout rate of the output
    kernel_init: nn.initializers.Initializer = nn.initializers.normal(INIT_STD)  # initial c_fc and c_gate
    residual_init: nn.initializers.Initializer = nn.initializers.normal(INIT_STD)  # initial c_proj
    dtype: DTypeLike = jnp.float32  # dtype of activations and matrix products

    @nn.compact
    def __call__(self, x_BTD: jax.Array, *, train: bool = False) -> jax.Array:
        """Return x_BTD after the network, with dropout in training."""
        project = functools.partial(Dense, use_bias=self.use_bias, dtype=self.dtype)
        h_BTF = project(self.hidden, kernel_init=self.kernel_init, name="c_fc")(x_BTD)
        gates = []
        if "glu" in self.activation:
            gates = [project(self.hidden, kernel_init=self.kernel_init, name="c_gate")(x_BTD)]
        h_BTF = self.act(h_BTF, *gates)
        out_BTD = project(x_BTD.shape[-1], kernel_init=self.residual_init, name="c_proj")(self.units(h_BTF))
        return nn.Dropout(self.dropout)(out_BTD, deterministic=not train)

    def act(self, h_BTF: jax.Array, gate_BTF: jax.Array | None = None) -> jax.Array:
        """Apply the nonlinearity, to the gate if there is one: a method, so that `nn.intercept_methods` sees it."""
        act = self.function or ACTIVATIONS[self.activation]
        return act(h_BTF) if gate_BTF is None else act(gate_BTF) * h_BTF

    def units(self, h_BTF: jax.Array) -> jax.Array:
        """Return the hidden units as they are: a method, so that `nn.intercept_methods` sees them."""
        return h_BTF
