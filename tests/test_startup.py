"""What a start costs, by what does not vary with the clock: modules imported, programs compiled, bytes kept."""

import dataclasses
import json

import jax
import jaxlib
import pytest

from jaxgpt.parallel import jax_setup
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.presets import quickstart
from tests.conftest import keep_compiled
from tests.helpers import check_command, run_command

HEAVY = ("jax", "flax", "optax", "orbax", "matplotlib", "tokenizers", "rich", "numpy")


def imported(code, tmp_path, *argv):
    done = check_command("-X", "importtime", "-c", code, *argv, cwd=tmp_path)
    lines = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    return [name.partition(".")[0] for name in lines]


def test_the_list_of_commands_imports_no_jax(tmp_path):
    code = """
import sys
from jaxgpt.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit as e:
    assert not e.code
"""
    assert not {*HEAVY}.intersection(imported(code, tmp_path, "--help"))


def test_the_loop_imports_what_it_needs_for_the_first_step(tmp_path):
    """Orbax takes a second, and is not needed before the first checkpoint. The number of our own modules only falls."""
    packages = imported("import jaxgpt.training", tmp_path)
    assert {*HEAVY}.intersection(packages) == {"jax", "flax", "optax", "numpy", "rich"}
    assert packages.count("jaxgpt") <= 51


# How many times XLA compiled each program of a run, and how many it read from the cache.
COUNT = """
import json, sys
from collections import Counter
import jax.monitoring
from jaxgpt import __main__
counts = Counter()
def told(name, *_, fun_name="", **__):
    if name.endswith("backend_compile_duration"):
        counts[fun_name] += 1
jax.monitoring.register_event_duration_secs_listener(told)
jax.monitoring.register_event_listener(lambda name, **_: counts.update([name.split("/")[-1]]))
__main__.main(sys.argv[1:])
print(json.dumps(counts))
"""


@pytest.mark.slow
def test_each_program_is_compiled_once_and_never_again_in_a_second_process(tmp_path, text_file):
    argv = f"""train --data.path {text_file} --model.n-layer 1 --model.n-head 1 --model.n-embd 8 --model.block-size 8
        --train.batch-size 2 --train.steps 3 --optim.warmup-steps 1 --train.eval-every 2 --train.sample-tokens 0 --parallel.strategy single""".split()
    env = {
        "JAXGPT_CACHE": str(tmp_path / "cache"),
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    first, second = (
        run_command("-c", COUNT, *argv, "--run-dir", str(tmp_path / name), cwd=tmp_path, **env) for name in "ab"
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    cold, warm = (json.loads(done.stdout.splitlines()[-1]) for done in (first, second))
    for name in ("train_step", "eval_step", "init_state"):
        assert sum(n for fun, n in cold.items() if name in fun) == 1, cold
    assert cold["cache_misses"] > 3 and not cold.get("cache_hits"), cold
    assert warm["cache_hits"] == cold["cache_misses"] and not warm.get("cache_misses"), warm


@pytest.fixture(scope="module")
def trainer():
    model = dataclasses.replace(quickstart().model, vocab_size=65)
    return make_trainer(dataclasses.replace(quickstart(), model=model))


def test_a_resumed_run_finds_the_step_compiled(trainer):
    """An initial state has the types of a restored one, none of them weak: otherwise the step is another program."""
    state = jax.eval_shape(trainer.init_state, jax.random.key(0))
    assert [x for x in jax.tree.leaves(state) if x.weak_type] == []


def test_bits_are_drawn_by_the_kernel_on_gpus_and_a_cpu_program_does_not_change(trainer):
    """Lowered for a GPU, which need not be there: `init_state` rotates no bits itself."""

    def lower(platform):
        traced = trainer.init_state.trace(jax.eval_shape(jax.random.key, 0), None)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    unrolled, on_cpu = lower("cuda"), lower("cpu")
    with trainer.draw_by_kernel():
        assert lower("cpu") == on_cpu
        assert "@cu_threefry2x32_ffi" in lower("cuda") and "shift_left" not in lower("cuda")
    assert "shift_left" in unrolled and lower("cuda") == unrolled


def test_the_cache_of_compiled_programs_is_bounded_and_the_users_alone(tmp_path, monkeypatch, private_cache):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    try:
        jax_setup.enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "xla" / jaxlib.__version__)
        assert (tmp_path / "xla" / jaxlib.__version__).stat().st_mode & 0o777 == 0o700
        assert 2**28 <= jax.config.jax_compilation_cache_max_size <= 2**33
    finally:
        keep_compiled(private_cache)  # as it was


KEPT = """
import os
import jax, jaxgpt
from jax._src.compiler import get_compile_options
from jaxgpt.parallel.mesh import GPU_OPTIONS
jaxgpt.configure_jax()
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name.endswith("/cache_hits")))
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
jax.jit(lambda x: x + 1, compiler_options=GPU_OPTIONS)(1.0)
options = get_compile_options(1, 1)
print(sum(hits), options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir)
"""


@pytest.mark.parametrize("named", ["", "kept"])
def test_a_cache_that_is_named_lies_there_or_nowhere(named, tmp_path):
    """With options for the compiler, too. Nothing is written relative to where the process is when it compiles."""
    env = {"JAX_COMPILATION_CACHE_DIR": named, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    said = [check_command("-c", KEPT, cwd=tmp_path, **env).stdout.split() for _ in range(2)]
    tuned = [str(tmp_path / named / "xla_gpu_per_fusion_autotune_cache_dir")] * bool(named)  # by XLA, on GPUs
    assert said == [["0", *tuned], [str(len(tuned)), *tuned]]
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", named} - {""}
    assert list((tmp_path / "elsewhere").iterdir()) == []
