import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import _generate, generate
from tests.helpers import TINY, apply, make_model

GREEDY = Sampling(greedy=True)


def naive(model, params, prompt, new_tokens):
    """Greedy continuation, one full forward pass per token, as a beginner writes it."""
    ids = list(prompt)
    for _ in range(new_tokens):
        logits = apply(model, params, jnp.array([ids[-TINY.block_size :]]))
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_the_naive_loop_for_ragged_prompts_and_past_the_context():
    model, params = make_model(TINY)
    params = jax.tree.map(lambda x: 5.0 * x, params)  # else the greedy text is one token for ever, whatever the window
    prompts = [[3], [1, 2, 3, 4, 5], [4] * TINY.block_size, list(range(10))]
    out = generate(model, params, prompts, key=jax.random.key(0), max_new_tokens=12, sampling=GREEDY)
    assert out.tokens == [naive(model, params, p, 12) for p in prompts]
    assert max(len(set(tokens)) for tokens in out.tokens) > 2


def test_the_same_key_gives_the_same_tokens_and_another_others():
    model, params = make_model(TINY)
    one, two, other = (
        generate(model, params, [[1, 2]], key=jax.random.key(k), max_new_tokens=20).tokens for k in (0, 0, 1)
    )
    assert one == two != other


def test_rows_draw_differently():
    model, params = make_model(TINY)
    out = generate(model, params, [[1, 2]] * 4, key=jax.random.key(0), max_new_tokens=20).tokens
    assert len({tuple(row) for row in out}) == 4


def test_padded_vocabulary_is_never_drawn():
    model, params = make_model(TINY)
    out = generate(model, params, [[0]] * 8, key=jax.random.key(0), max_new_tokens=50, vocab_size=4)
    assert np.max(out.tokens) == 3


def test_prompts_of_any_length_share_one_compilation():
    model, params = make_model(TINY)
    _generate.clear_cache()
    for length in range(1, 12):
        generate(model, params, [[1] * length], key=jax.random.key(0), max_new_tokens=3, sampling=GREEDY)
    assert _generate._cache_size() == 1


@pytest.mark.parametrize(
    ("prompts", "new", "said"),
    [
        ([], 1, "no prompts"),
        ([[1], []], 1, "prompt 1 is empty"),
        ([[1]], 0, "max_new_tokens=0"),
        ([[11]], 1, "the model knows 0 to 10"),
        ([[-1]], 1, "the model knows 0 to 10"),
    ],
)
def test_misuse_is_told(prompts, new, said):
    model, params = make_model(TINY)
    with pytest.raises(UserError, match=said):
        generate(model, params, prompts, key=jax.random.key(0), max_new_tokens=new)
