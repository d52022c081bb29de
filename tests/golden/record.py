"""What this code computes, to the bit: losses, parameters, samples, scores and exports of tiny runs.

`python -m tests.golden.record` writes it to house.json. After a change that is to change no number, `--check` computes it
again, prints each case that differs, and exits with 1 if one does; `--only NAME ...` takes some cases (names may have *).
On another processor, or with other versions of jax, last bits differ, and `--check` exits with 2: then check out the
last commit of house.json, which computes the same, record there with `--house FILE`, and compare with that file.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import hashlib
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxgpt

HOUSE = Path(__file__).parent / "house.json"
REPOSITORY = Path(__file__).parents[2]
DEADLINE = 1500  # seconds, after which a process is killed
# The programs are many and run for a moment: compiled fast, as in tests/conftest.py.
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_experimental_ynn_fusion_type=-reduce"  # as `configure_jax` sets it
)

# What is used besides `jaxgpt`'s public names: one function for each, so that what moves is renamed in one place.


def export_run(run: Path, out: Path) -> None:
    from jaxgpt.tools.convert import export_hf

    export_hf(run, out)


def import_model(model: Path, run: Path) -> None:
    from jaxgpt.tools.convert import import_model

    import_model(str(model), run)


def evaluate_text(run: Any, path: str | None = None, **options: Any) -> dict[str, Any]:
    from jaxgpt.tools.evaluate.evaluate import evaluate_run

    return evaluate_run(run, path, **options)


# Texts


def text() -> str:
    """Made of forty words, of which some like to follow each other."""
    words = (
        "a an the of in lance rack lean hack greyhound old buckler village name house garden river stone bridge man "
    )
    words += "woman reads writes sees keeps sells finds green narrow silent late when where because and but not 1605 42"
    draw, listed = random.Random(0), words.split()
    lines, at = [], 0
    for _ in range(300):
        line = []
        for _ in range(draw.randint(4, 12)):
            at = (at * 7 + draw.randint(0, 3)) % len(listed)
            line.append(listed[at])
        lines.append(" ".join(line).capitalize() + draw.choice([".", ".", "!", "?", "; ¿señor?"]))
    return "\n".join(lines) + "\n"


def conversations() -> str:
    """Sums, in questions of several lengths."""
    draw, lines = random.Random(1), []
    for _ in range(60):
        a, b = draw.randint(0, 20), draw.randint(0, 20)
        messages = [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": str(a + b)}]
        if draw.random() < 0.3:
            messages += [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "yes"}]
        lines.append(json.dumps({"messages": messages}))
    return "\n".join(lines) + "\n"


TEXTS = {"text.txt": text, "sums.jsonl": conversations}
CHAT = {"data": {"path": "sums.jsonl"}}

# Experiments: what differs from `experiment`'s values, by part.

LLAMA = dict(norm="rmsnorm", bias=False, position="rope", activation="swiglu", norm_eps=1e-6, tie_embeddings=False)
GEMMA = LLAMA | dict(
    activation="geglu_tanh", tie_embeddings=True, norm_offset=True, scale_embeddings=True, head_dim=16, n_kv_head=1
)
SANDWICH = GEMMA | dict(norm_position="sandwich", query_scale=24.0, sliding_window=8, global_every=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA
    | dict(n_kv_head=2, rope_scaling="llama3", rope_factor=8.0, rope_original_context=16, rope_theta=5e5),
    "mistral": LLAMA | dict(n_kv_head=2, sliding_window=8),
    "qwen2": LLAMA | dict(n_kv_head=2, qkv_bias=True, out_bias=False),
    "qwen3": LLAMA | dict(n_kv_head=2, head_dim=16, qk_norm=True),
    "gemma": GEMMA,
    "gemma2": SANDWICH | dict(logit_softcap=30.0, attention_softcap=50.0),
    "gemma3_text": SANDWICH
    | dict(qk_norm=True, rope_theta=1e6, rope_scaling="linear", rope_factor=8.0, rope_local_theta=1e4),
    "gpt_neox": dict(
        position="rope", rope_fraction=0.25, parallel_residual=True, activation="gelu", tie_embeddings=False
    ),
    "olmo2": LLAMA | dict(norm_position="output", qk_norm=True, qk_norm_over="heads"),
}
MESH = dict(strategy="mesh")
RUNS: dict[str, dict[str, Any]] = {
    **{family: {"model": model} for family, model in FAMILIES.items()},
    "none": {"model": {"position": "none", "activation": "relu2", "residual_init": "zero"}},
    "sinusoidal": {"model": {"position": "sinusoidal", "activation": "geglu", "logit_softcap": 5.0}},
    "dropout": {"model": {"dropout": 0.2}},
    "dropout-accumulate": {"model": {"dropout": 0.2}, "parallel": {"micro_batch_size": 4}},
    "remat-full": {"model": {"remat": "full", "dropout": 0.1}},
    "scan": {"model": LLAMA | {"scan_layers": True}},
    "scan-dropout-remat": {"model": {"scan_layers": True, "dropout": 0.1, "remat": "dots"}},
    "loss-chunk": {"parallel": {"loss_chunk": 8}},
    "bfloat16": {"train": {"dtype": "bfloat16"}, "model": LLAMA},
    "bytes": {"data": {"tokenizer": "byte"}},
    "lora": {"lora": {"rank": 4, "targets": ("q", "v", "c_proj")}, "train": {"init_from": "gpt2"}},
    "finetune": {"train": {"init_from": "llama"}, "model": {"dropout": 0.1}},
    "chat": CHAT | {"model": LLAMA, "optim": {"label_smoothing": 0.1}},
    "muon": {"model": LLAMA, "optim": {"name": "muon"}},
    "muon-scan": {"model": LLAMA | {"scan_layers": True}, "optim": {"name": "muon", "schedule": "wsd"}},
    "adamw-constant": {"optim": {"schedule": "constant", "grad_clip": None, "weight_decay": 0.0}},
    "adamw-inverse-sqrt": {"optim": {"schedule": "inverse_sqrt", "warmup_steps": 5, "beta1": 0.8, "grad_clip": 0.1}},
    "pmap2-accumulate": {"devices": 2, "parallel": {"micro_batch_size": 1}, "model": {"dropout": 0.1}},
    "pmap8": {"devices": 8, "parallel": {"strategy": "pmap"}},
    "pmap8-chat": CHAT | {"devices": 8, "parallel": {"strategy": "pmap"}, "model": {"dropout": 0.1}},
    "mesh-data": {"devices": 8, "parallel": MESH},
    "mesh-fsdp": {"devices": 8, "parallel": MESH | {"data": 1, "fsdp": 8}},
    "mesh-mixed": {
        "devices": 8,
        "parallel": MESH | {"data": 2, "fsdp": 2, "tensor": 2, "micro_batch_size": 1, "loss_chunk": 8},
        "model": LLAMA | {"dropout": 0.1},
    },
    "mesh-muon-scan": {
        "devices": 8,
        "parallel": MESH | {"fsdp": 4},
        "model": LLAMA | {"scan_layers": True, "n_kv_head": 2},
        "optim": {"name": "muon"},
    },
    "mesh-lora": {
        "devices": 8,
        "parallel": MESH | {"fsdp": 2, "tensor": 2},
        "lora": {"rank": 2},
        "train": {"init_from": "mesh-data"},
    },
}

# The cases: name -> (the process that computes it, function). Processes of one device share the work.

CASES: dict[str, tuple[str, Callable[[], Any]]] = {}


def case(name: str, process: str | int = "1") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """process: its devices, and perhaps a letter."""

    def keep(function: Callable[[], Any]) -> Callable[[], Any]:
        CASES[name] = (str(process), function)
        return function

    return keep


def process_of(name: str) -> str:
    """Where one of RUNS is trained."""
    return str(RUNS[name].get("devices", "1" if name in FAMILIES else "1b"))


def experiment(name: str) -> Any:
    """One of RUNS. Files are in the working directory, which every process has its own of."""
    given = RUNS[name]
    model = dict(n_layer=2, n_head=4, n_embd=32, block_size=32) | given.get("model", {})
    optim = dict(learning_rate=1e-2, warmup_steps=2) | given.get("optim", {})
    train = dict(steps=20, batch_size=8, log_every=1, eval_every=10, eval_tokens=512, dtype="float32", sample_tokens=0)
    if "tensor" in given.get("parallel", {}):
        model["vocab_size"] = 64  # which divides
    return jaxgpt.Experiment(
        name=name,
        model=jaxgpt.GPTConfig(**model),
        data=jaxgpt.DataConfig(**({"path": "text.txt"} | given.get("data", {}))),
        optim=jaxgpt.OptimConfig(**optim),
        train=jaxgpt.TrainConfig(**(train | dict(checkpoint_every=10) | given.get("train", {}))),
        lora=jaxgpt.LoraConfig(**given.get("lora", {})),
        parallel=jaxgpt.ParallelConfig(**given.get("parallel", {})),
    )


@functools.cache
def trained(name: str) -> Any:
    """The run, with its last parameters; trained once in a process."""
    base = RUNS[name].get("train", {}).get("init_from")
    if base is not None:
        trained(base)
    jaxgpt.fit(experiment(name), name, progress=False)
    return jaxgpt.load(name, which="last")


def digest(parts: dict[str, Any]) -> str:
    """SHA-256 of arrays by their names: of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, value in sorted(parts.items()):
        array = np.asarray(value)
        found.update(f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
    return found.hexdigest()


def parameters(run: Any) -> str:
    paths = ((jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(run.params))
    # The output matrix was no module when house.json was recorded.
    return digest({path.replace("['lm_head']['kernel']", "['lm_head']"): x for path, x in paths})


def curve(run: Any) -> dict[str, Any]:
    """What training left behind, without its times."""
    lines = [json.loads(line) for line in (Path(run.directory) / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    said = [(x["step"], *(x.get(k) for k in ("loss", "grad_norm", "learning_rate", "skipped"))) for x in lines]
    return {
        "losses": list(map(repr, losses.values())),
        "validation": {line["step"]: repr(line["val_loss"]) for line in lines if "val_loss" in line},
        "skipped": [line["step"] for line in lines if "skipped" in line],
        "metrics": hashlib.sha256(json.dumps(said).encode()).hexdigest(),
        "parameters": parameters(run),
    }


def _train(name: str) -> dict[str, Any]:
    return curve(trained(name))


for _name in RUNS:
    case(f"train.{_name}", process_of(_name))(functools.partial(_train, _name))


def _resumed(name: str) -> dict[str, Any]:
    """The first half is another run's: what was computed after it is taken away, and computed again."""
    whole, half = trained(name), f"{name}-resumed"
    shutil.copytree(name, half)
    shutil.rmtree(f"{half}/checkpoints/20")
    jaxgpt.fit(experiment(name), half, progress=False)
    found = curve(jaxgpt.load(half, which="last"))
    return found | {"equal": found == curve(whole)}


for _name in ("gpt2", "dropout", "muon-scan", "lora", "chat", "pmap8", "mesh-mixed"):
    case(f"resume.{_name}", process_of(_name))(functools.partial(_resumed, _name))


# Exports, and back


def tensors_of(model: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return {name: x for file in sorted(model.glob("*.safetensors")) for name, x in load_file(file).items()}


def _export(name: str) -> dict[str, Any]:
    run, out, back = trained(name), Path(f"{name}-hf"), Path(f"{name}-back")
    export_run(run.directory, out)
    import_model(out, back)
    export_run(back, Path(f"{name}-again"))
    tensors, again = tensors_of(out), tensors_of(Path(f"{name}-again"))
    return {
        "files": sorted(path.name for path in out.iterdir()),
        "config": json.loads((out / "config.json").read_text()),
        "tokenizer": hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest(),
        "tensors": {name: digest({name: x})[:16] for name, x in sorted(tensors.items())},
        "back equal": digest(again) == digest(tensors),
        "text": jaxgpt.load(back).sample("The ", max_new_tokens=16, temperature=0.0),
    }


for _name in (*FAMILIES, "scan", "lora", "finetune"):
    case(f"export.{_name}", process_of(_name))(functools.partial(_export, _name))


# Samples


PROMPTS = ["The lance", "A", "The village of the old man. W", "1605 greyhound and the narrow garden by the bridge"]


def _hex(numbers: Any) -> list[str]:
    return [float(x).hex() for x in numbers]


def _ids(run: Any, prompts: list[str] = PROMPTS) -> list[list[int]]:
    return [run.tokenizer.encode(prompt).tolist() for prompt in prompts]


def _generated(
    name: str, prompts: list[str], *, tokens: int = 16, weights: Any = None, cache: Any = None, **how: Any
) -> dict[str, Any]:
    """Ids and their log-probabilities, by the function that all sampling goes through."""
    run = trained(name)
    found = jaxgpt.generate(
        *jaxgpt.for_decoding(run.model, run.params, weights),
        [row[-run.model.config.block_size :] for row in _ids(run, prompts)],
        key=jax.random.key(5),
        max_new_tokens=tokens,
        sampling=jaxgpt.Sampling(**how),
        vocab_size=run.tokenizer.vocab_size,
        cache_dtype=cache,
        logprobs=True,
    )
    return {
        "ids": found.tokens,
        "logprobs": hashlib.sha256(json.dumps([_hex(row) for row in found.logprobs]).encode()).hexdigest(),
        "prompts": hashlib.sha256(json.dumps([_hex(row) for row in found.prompt_logprobs]).encode()).hexdigest(),
    }


SAMPLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.3},
    "all": {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1},
    "greedy": {"greedy": True},
    "int8": {"weights": "int8", "cache": "int8"},
    "bfloat16": {"weights": "bfloat16", "cache": "bfloat16"},
}
for _name, _how in SAMPLES.items():
    case(f"sample.{_name}")(functools.partial(_generated, "gpt2", PROMPTS, **_how))
# Past the context of 32: positions that slide, and those whose table ends.
for _name in (*FAMILIES, "none", "sinusoidal", "scan"):
    case(f"slide.{_name}", process_of(_name))(functools.partial(_generated, _name, PROMPTS[:2], tokens=48))


@case("sample.text")
def _text() -> dict[str, Any]:
    """By the run's own function: a batch, in which each copy of a prompt has a seed of its own."""
    return {"batch": trained("llama").sample(["The ", "A man", "The "], max_new_tokens=24, seed=3)}


@case("sample.chat", "1b")
def _chat() -> Any:
    run = trained("chat")
    return [run.sample(["2+2?", "17+5?"], chat=True, max_new_tokens=8, temperature=t) for t in (0.0, 1.0)]


# Scores


@case("score.texts")
def _scores() -> dict[str, Any]:
    found = {}
    for name in ("gpt2", "gemma3_text", "bytes"):
        run = trained(name)
        ids = [run.tokenizer.encode(line).tolist() for line in (PROMPTS[0], text()[:150])]
        texts = run.score([PROMPTS[2], text()[300:380]])
        found[name] = {
            "run": [[score.bits.hex(), score.tokens, score.characters] for score in texts],
            "logprobs": [_hex(row) for row in jaxgpt.score(run.model, run.params, [ids[0]])],
            "int8": digest({"long": jaxgpt.score(*jaxgpt.for_decoding(run.model, run.params, "int8"), ids)[1]}),
        }
    return found


@case("score.evaluate", "1b")
def _evaluate() -> dict[str, Any]:
    """The figures of the validation split, of another text, and of documents."""
    Path("held.txt").write_text(text()[2000:3000], encoding="utf-8")

    def exact(found: dict[str, Any]) -> dict[str, Any]:
        return {key: value.hex() if isinstance(value, float) else value for key, value in found.items()}

    return {
        **{name: exact(evaluate_text(trained(name))) for name in ("gpt2", "bytes", "lora", "chat")},
        "stride": exact(evaluate_text(trained("llama"), "held.txt", stride=8)),
    }


# Recording


def machine() -> dict[str, str]:
    """What decides the last bits besides the code."""
    said = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    about = dict(re.findall(r"^(vendor_id|cpu family|model|flags)\s*: (.*)$", said, re.MULTILINE))
    width = next((name for name in ("avx512f", "avx2", "avx") if name in about.get("flags", "").split()), "none")
    found = {key: about.get(key, "") for key in ("vendor_id", "cpu family", "model")} | {"vectors": width}
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    return found | {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}


def child(names: list[str], out: Path) -> None:
    """Compute cases in this process, in its working directory; a line of JSON for each that succeeds."""
    for name, make in TEXTS.items():
        Path(name).write_text(make(), encoding="utf-8")
    with open(out, "w") as f:
        for name in names:
            try:
                f.write(json.dumps([name, CASES[name][1]()]) + "\n")
            except Exception:
                traceback.print_exc()
            f.flush()


def compute(names: list[str]) -> dict[str, Any]:
    """The cases, in their processes, of which two run at a time."""
    groups = {key: of for key in ("8", "1b", "1", "2") if (of := [n for n in names if CASES[n][0] == key])}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgpt-golden"
    environment = {n: value for n, value in os.environ.items() if not n.startswith(("XLA_", "JAX", "TPU_"))}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
        "PYTHONPATH": str(REPOSITORY),
        "MPLBACKEND": "agg",
    }

    def run(key: str) -> dict[str, Any]:
        """What a process found, as far as it came; what went wrong is printed."""
        place = Path(folder, key)
        place.mkdir()
        flags = f"{FLAGS} --xla_force_host_platform_device_count={key[0]}"
        own = {"XLA_FLAGS": flags, "JAXGPT_CACHE": str(place / "cache")}
        command = [sys.executable, "-m", "tests.golden.record", "--child", "found", "--only", *groups[key]]
        with open(place / "said", "wb") as said:
            subprocess.run(command, cwd=place, env=environment | own, stdout=said, stderr=said, timeout=DEADLINE)
        lines = (place / "found").read_text().splitlines() if (place / "found").exists() else []
        if len(lines) < len(groups[key]):
            print(f"process {key} failed:\n{(place / 'said').read_text(errors='replace')[-3000:]}")
        return dict(map(json.loads, lines))

    with tempfile.TemporaryDirectory(prefix="golden-") as folder, ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(run, groups))
    return {name: value for part in parts for name, value in part.items()}


def places(name: str, value: Any) -> dict[str, Any]:
    """Numbers and texts by where they are."""
    if isinstance(value, list):
        value = {str(number): x for number, x in enumerate(value)}
    if not isinstance(value, dict):
        return {name: value}
    return {place: x for key, inner in value.items() for place, x in places(f"{name} {key}", inner).items()}


def check(recorded: dict[str, Any], found: dict[str, Any], names: list[str]) -> int:
    """Print where values differ, and return in how many cases."""
    wrong = 0
    for name in names:
        before, now = places(name, recorded.get(name)), places(name, found.get(name))
        differing = [place for place in before | now if before.get(place) != now.get(place)]
        for place in differing[:8]:
            print(f"{place}: {str(before.get(place))[:80]} -> {str(now.get(place))[:80]}")
        wrong += bool(differing) or name not in found
    print(f"{len(names) - wrong} of {len(names)} cases are equal")
    return wrong


def record(house: Path, cases: dict[str, Any]) -> None:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    commit = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(cases.items()))
    head = f'"commit": {json.dumps(commit)},\n"machine": {json.dumps(machine())}'
    house.write_text(f'{{\n{head},\n"cases": {{\n{lines}\n}}\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with house.json instead of writing it")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="cases; * stands for anything")
    parser.add_argument("--house", type=Path, default=HOUSE, metavar="FILE", help="instead of house.json")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [name for name in CASES if any(fnmatch.fnmatch(name, pattern) for pattern in options.only)]
    if options.child:
        return child(names, options.child)
    there = json.loads(options.house.read_text()) if options.house.exists() else {"machine": machine(), "cases": {}}
    is_here = there["machine"] == machine()
    if options.check and not is_here:
        print(f"{options.house} is of {there['machine']}, and this is {machine()}: see the top of record.py")
        raise SystemExit(2)
    found = json.loads(json.dumps(compute(names)))
    if options.check:
        raise SystemExit(check(there["cases"], found, names) > 0)
    if lost := names - found.keys():
        raise SystemExit(f"nothing is recorded: {', '.join(lost)} failed")
    kept = {name: value for name, value in there["cases"].items() if name in CASES} if is_here else {}
    record(options.house, kept | found)


if __name__ == "__main__":
    main()
