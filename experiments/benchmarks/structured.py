"""Is structured output always valid, and what does its mask cost?

Question:  how many of a small model's thousand completions are JSON that follows its schema? How much longer does a decode
           step of eight rows take with a grammar in every row?
Command:   python experiments/benchmarks/structured.py RUN [--count 1000]        (needs pip install "jaxgpt[serve]" jsonschema)
Method:    four schemas in turn, drawn at temperature 1 in 60 tokens, checked by jsonschema. For the cost one engine takes
           turns: bursts of eight steps without a grammar, single steps without one, single steps with an expression that
           any text matches, so that all rows draw equally many tokens. A grammar needs single steps, since the host
           must see each token before it can mask the next.
Result:    LOG.md, 2026-11-25, "structured output and its mask".
"""

import argparse
import json
import statistics
import time

import jax
import jsonschema

import jaxgpt
from jaxgpt.sample import Sampling
from jaxgpt.sample.engine import Engine, Request
from jaxgpt.sample.grammar import Grammar, compile_grammar

PLACE = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x", "y"]}
SCHEMAS = {
    "any object": {"type": "object"},
    "a person": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "a place": {
        "type": "object",
        "properties": {"kind": {"enum": ["town", "village"]}, "at": PLACE, "known": {"type": ["boolean", "null"]}},
        "required": ["kind", "at", "known"],
    },
    "a list": {
        "type": "array",
        "items": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
        "minItems": 1,
    },
}
SLOTS, NEW, ROUNDS = 8, 128, 9


def count_valid(run: jaxgpt.Run, count: int) -> None:
    """Print how many of `count` completions follow their schema, and one of each."""
    valid, each = 0, -(-count // len(SCHEMAS))
    for name, schema in SCHEMAS.items():
        texts = run.sample(
            [f"The {number}: " for number in range(each)], schema=schema, max_new_tokens=60, temperature=1.0
        )
        for text in texts:
            try:
                jsonschema.validate(json.loads(text), schema)
                valid += 1
            except (ValueError, jsonschema.ValidationError) as error:
                print(f"not valid: {text!r}: {error}")
        print(f"{name}: {texts[0]}")
    print(f"{valid} of {each * len(SCHEMAS)} are valid\n")


def measure_steps(run: jaxgpt.Run) -> None:
    """Print the time of a decode step of eight rows, without a grammar and with one."""
    model, params = run.decode_params
    engine = Engine(model, params, slots=SLOTS, vocab_size=run.tokenizer.vocab_size)
    engine.warm_up()
    prompt = tuple(run.tokenizer.encode("The ").tolist())
    new = min(NEW, model.config.block_size - len(prompt))

    def seconds(grammar: Grammar | None, burst: int) -> float:
        for number in range(SLOTS):
            key = jax.random.key(number)
            engine.submit(Request(prompt=prompt, key=key, max_new_tokens=new, sampling=Sampling(), grammar=grammar))
        engine.finish_reading()
        began = time.perf_counter()
        while engine.num_free < SLOTS:
            engine.step(burst)
        return (time.perf_counter() - began) / new

    anything = compile_grammar(run.tokenizer, regex=r"(.|\n)*")
    ways = {"bursts of eight": (None, 8), "single steps": (None, 1), "single steps, masked": (anything, 1)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            times[name] += [seconds(*way)] if number else []
    print(f"| {SLOTS} rows | ms a step: median (least to most) |\n|---|---|")
    for name, found in times.items():
        ms = sorted(1e3 * x for x in found)
        print(f"| {name} | {statistics.median(ms):.2f} ({ms[0]:.2f} to {ms[-1]:.2f}) |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    run = jaxgpt.load(options.run)
    count_valid(run, options.count)
    measure_steps(run)
