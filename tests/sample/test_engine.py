"""Continuous batching: requests come and go, and no result depends on the others."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxgpt.sample import Sampling, programs
from jaxgpt.sample.engine import Engine, Request, prompt_keys
from jaxgpt.sample.quantize import for_decoding
from tests.helpers import TINY, make_model

C, SLOTS = 64, 4
CONFIG = dataclasses.replace(TINY, block_size=C, n_layer=1, n_embd=32, n_head=4, n_kv_head=2, position="rope")
SAMPLINGS = [
    Sampling(),
    Sampling(greedy=True),
    Sampling(temperature=1.5, top_k=5),
    Sampling(top_p=0.9, min_p=0.05),
    Sampling(repetition_penalty=1.5, logit_bias=((1, -5.0),)),
]


@functools.cache
def lively():
    model, params = make_model(CONFIG)
    return model, jax.tree.map(lambda x: 5.0 * x, params)


def long():
    """The same with a longer context."""
    model, params = lively()
    return model.clone(config=dataclasses.replace(CONFIG, block_size=4 * C)), params


def requests(count, seed=0):
    """Of all lengths, limits and kinds of sampling."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        prompt = rng.integers(0, 11, rng.integers(1, C)).tolist()
        (key,) = prompt_keys(jax.random.key(number), [prompt])
        yield Request(
            prompt=prompt,
            key=key,
            max_new_tokens=int(rng.integers(1, 40)),
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            stop_tokens=[3] if number % 3 == 0 else [],
            top_logprobs=(None, 0, 4)[number % 3],
        )


def serve(engine, wanted, burst=8):
    """Return (tokens, logprobs, top, finish) of each request, with as many at once as there are slots."""
    wanted, running, done = list(wanted), {}, {}
    ahead = list(enumerate(wanted))
    while ahead or running:
        while ahead and engine.num_free:
            number, request = ahead.pop(0)
            running[engine.submit(request)] = number
        for piece in engine.step(burst):
            so_far = done.setdefault(running[piece.slot], [[], [], [], None])
            for at, new in enumerate((piece.tokens, piece.logprobs, piece.top)):
                so_far[at] = so_far[at] + new
            so_far[3] = piece.finish
            if piece.finish:
                del running[piece.slot]
    assert engine.num_free == engine.slots
    return [done[number] for number in range(len(wanted))]


def test_many_requests_at_once_have_the_bits_of_each_alone():
    engine = Engine(*lively(), slots=SLOTS)
    together = serve(engine, requests(20))
    assert [serve(engine, [request])[0] for request in requests(20)] == together
    assert serve(engine, requests(20), burst=3) == together
    for request, (tokens, logprobs, top, finish) in zip(requests(20), together, strict=True):
        room = C + 1 - len(request.prompt)
        assert finish == ("length" if len(tokens) == min(request.max_new_tokens, room) else "stop")
        wanted = request.top_logprobs
        assert len(logprobs) == (0 if wanted is None else len(tokens))
        for token, logprob, best in zip(tokens[: len(logprobs)], logprobs, top, strict=True):
            assert len(best) == wanted and dict(best).get(token, logprob) == logprob
            assert best == sorted(best, key=lambda pair: -pair[1])


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_loop_of_known_length_draws_the_same(monkeypatch, position):
    """It is a GPU's, for requests that are greedy or have a temperature. Others take the turns that they need."""
    monkeypatch.setattr(programs, "GPU_COLUMNS", 32)
    slides = position == "rope"
    model, params = make_model(dataclasses.replace(CONFIG, position=position, sliding_window=5 if slides else None))
    params, dtype = jax.tree.map(lambda x: 5.0 * x, params), "int8" if slides else "float32"
    engines = [Engine(model, params, slots=SLOTS, slides=True, cache_dtype=dtype) for _ in range(2)]
    engines[1]._has_plain = True
    decode_plain, calls = programs.decode_plain, []
    monkeypatch.setattr(programs, "decode_plain", lambda *args: calls.append(args[3:]) or decode_plain(*args))
    plain = [Sampling(), Sampling(greedy=True), Sampling(temperature=1.5)]
    for burst, seed in ((8, 3), (64, 4), (13, 5)):
        rng, wanted = np.random.default_rng(seed), []
        for request in requests(12, seed):
            is_plain = rng.random() < 0.9
            sampling = plain[rng.integers(3)] if is_plain else request.sampling
            drawn = dict(
                sampling=sampling, top_logprobs=None if is_plain else 2, max_new_tokens=int(rng.integers(1, 96))
            )
            wanted.append(dataclasses.replace(request, prompt=request.prompt[:burst], **drawn))
        general, static = (serve(engine, wanted, burst) for engine in engines)
        assert [(tokens, finish) for tokens, *_, finish in static] == [(t, finish) for t, *_, finish in general]
        assert {finish for *_, finish in static} == {"length", "stop"}
    steps, columns, greedy = map(set, zip(*calls, strict=True))
    assert (steps, columns, greedy) == ({8, 64}, {32, C}, {False, True})


@pytest.mark.slow
def test_as_many_rows_are_computed_as_are_occupied(monkeypatch):
    computed, decode = [], programs.decode

    def count(*args):
        computed.append(len(args[2].rows.left_B))
        return decode(*args)

    monkeypatch.setattr(programs, "decode", count)
    engine = Engine(*lively(), slots=SLOTS, resizes=True)
    for (tokens, logprobs, *rest), expected in zip(
        serve(engine, requests(12)), serve(Engine(*lively(), slots=SLOTS), requests(12)), strict=True
    ):
        assert [tokens, *rest[1:]] == [expected[0], *expected[3:]]
        np.testing.assert_allclose(logprobs, expected[1], rtol=1e-4, atol=1e-4)  # 5.7e-5 on an Intel Xeon (model 207)
    assert set(computed) == {1, 2, SLOTS}


@pytest.mark.parametrize("resizes", [pytest.param(False, marks=pytest.mark.slow), True])
def test_after_the_warm_up_nothing_compiles(resizes):
    engine = Engine(*long(), slots=2, prefix_bytes=10**6, resizes=resizes)
    engine._has_plain = resizes
    engine.warm_up()
    wanted = [
        dataclasses.replace(request, prompt=(request.prompt * 4)[: 4 * C - number])
        for number, request in enumerate(requests(8, seed=1))
    ]
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        serve(engine, wanted)
        engine.cancel(engine.submit(wanted[0]))
    finally:
        jax.monitoring.clear_event_listeners()
    assert [name for name in compiled if "compile" in name] == []


def test_a_common_beginning_is_read_once_and_changes_no_bit():
    model, params = long()
    shared = np.random.default_rng(0).integers(0, 11, 200).tolist()
    wanted = [
        Request(prompt=[*shared[:length], 1, 2], key=jax.random.key(length), max_new_tokens=5, top_logprobs=3)
        for length in (200, 199, 64, 100, 200)
    ]
    plain = serve(Engine(model, params, slots=2), wanted)
    engine = Engine(model, params, slots=2, prefix_bytes=10**7)
    cached = []
    for request, expected in zip(wanted, plain, strict=True):
        slot = engine.submit(request)
        engine.finish_reading()
        cached.append(engine.cached_tokens[slot])
        engine.cancel(slot)
        assert serve(engine, [request]) == [expected]
    assert cached == [0, 192, 64, 64, 192]  # chunks of 64 tokens
    others = [dataclasses.replace(request, prompt=[5, *request.prompt[1:]]) for request in wanted[2:]]  # all new
    assert serve(engine, others) == serve(Engine(model, params, slots=2), others)
    small = Engine(model, params, slots=2, prefix_bytes=10_000)  # one chunk of 64 tokens takes 8,192 bytes
    assert serve(small, wanted + wanted) == plain + plain
    assert len(small._prefixes._chunks) == 1


@pytest.mark.parametrize("resizes", [False, True])
def test_a_cancelled_request_leaves_its_slot_and_the_others_alone(resizes):
    first, second, third = requests(3, seed=2)
    expected = serve(Engine(*lively(), slots=2), [second, third])
    engine = Engine(*lively(), slots=2, resizes=resizes)
    slot, other = engine.submit(first), engine.submit(second)
    engine.step(1)
    engine.cancel(slot)  # while it is read, or decoded
    assert engine.num_free == 1 and engine.submit(third) == slot
    done = {slot: [], other: []}
    while engine.num_free < engine.slots:
        for piece in engine.step():
            done[piece.slot] += piece.tokens
    assert [done[other], done[slot]] == [tokens for tokens, *_ in expected]


def test_a_deep_models_prompt_is_read_block_by_block_to_the_same_bits(monkeypatch):
    model, params = for_decoding(*make_model(dataclasses.replace(CONFIG, n_layer=3)))
    tokens_1T, caches = np.arange(8, dtype=np.int32)[None], []
    for deep in (1, 99):
        monkeypatch.setattr(programs, "DEEP", deep)
        cache = programs.allocate_cache(model, params, 1, C, None)
        caches.append(programs.prefill(model, params, cache, tokens_1T, np.int32(0), np.int32(7)))
    jax.tree.map(np.testing.assert_array_equal, *caches)
    assert all(np.any(x) for x in jax.tree.leaves(caches[0]))
