"""Strict JAX, a private cache, and the small things that several tests share."""

import os
import signal
from pathlib import Path

from jaxgpt.parallel.jax_setup import NO_FUSED_REDUCTIONS, configure_jax

# Tests compile thousands of tiny programs and run each once: compile fast, run slowly. Before jax is imported.
# Without the fusion emitters a training step compiles in 1.2 s of CPU, with them in 3.1 (jax 0.10.2, AMD EPYC).
# jax 0.12.0.1 takes the option that stops them, and uses them all the same.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        "--xla_cpu_parallel_codegen_split_count=1",
        NO_FUSED_REDUCTIONS,  # as every entrance sets it, but in time for what a test module computes at its import
    ]
)

import jax
import pytest

from tests.browser import chromium, open_page  # noqa: F401, fixtures: two browsers in one process stand in each other's way

jax.config.update("jax_numpy_rank_promotion", "raise")

REPOSITORY = Path(__file__).parent.parent

# Letters with sizes that all differ, so that a swapped axis cannot pass (see jaxgpt/layers/__init__.py).
SIZES = {"B": 2, "T": 5, "N": 6, "K": 3, "H": 4, "D": 24, "F": 28, "V": 11, "L": 7}

TEXT = (
    """In a village of La Mancha, the name of which I have no desire to call to mind, there lived not long since
one of those gentlemen that keep a lance in the lance-rack, an old buckler, a lean hack, and a greyhound.
"""
    * 8
)


signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what it starts in the background


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory):
    """Corpora, token files and compiled programs of the tests, away from the user's."""
    directory = tmp_path_factory.mktemp("cache")
    os.environ["JAXGPT_CACHE"] = str(directory)
    configure_jax()  # now, so that no test changes the process in its middle
    keep_compiled(directory)
    return directory


@pytest.fixture(scope="session", autouse=True)
def shared_trainers():
    """Steps that several tests train with are traced and compiled once: a trainer is a value, of these fields alone."""
    from jaxgpt import training

    make, made = training.make_trainer, {}

    def shared(e, devices=None, *, recorded=None):
        t = e.train
        model = (e.model, e.optim, e.objective, e.lora, e.parallel)
        steps = (e.data.is_packed, t.steps, t.batch_size, t.dtype, t.attention)
        key = (model, steps, devices and tuple(devices), recorded)
        if key not in made:
            made[key] = make(e, devices, recorded=recorded)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "make_trainer", shared)
        yield made


@pytest.fixture(scope="module", autouse=True)
def bounded_maps(shared_trainers):
    """Forget all programs long before their memory maps are as many as Linux allows, where the process crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPS:
        shared_trainers.clear()
        jax.clear_caches()


def keep_compiled(directory: Path) -> None:
    """What the command line does for itself: tests train the same few models again and again.

    In a directory of its own, without bound: the commands bound theirs, and count on every entry having its time of use.
    """
    jax.config.update("jax_compilation_cache_dir", str(directory / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_compilation_cache_max_size", -1)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "mancha.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_run(text_file, tmp_path_factory):
    """A run of `tiny_experiment`, trained once in each process. Tests only read it: who changes it copies its directory."""
    from jaxgpt.training import fit
    from tests.helpers import tiny_experiment

    return fit(tiny_experiment(text_file), tmp_path_factory.mktemp("tiny") / "run", progress=False)


@pytest.fixture(scope="session")
def real_text():
    """The folder of real text that JAXGPT_TEST_DATA names."""
    directory = os.environ.get("JAXGPT_TEST_DATA")
    if not directory or not Path(directory).is_dir():
        pytest.skip("JAXGPT_TEST_DATA names no folder of real text (sancho.txt, quijote.txt, shakespeare.txt)")
    return Path(directory)


# What takes longest comes first, so that no process is left alone with one of these at the end.
LONGEST = """test_lessons.py tools/plan/test_slices.py tools/plan/test_gpu_plans.py test_docs.py
parallel/test_strategies.py test_transformer_2017.py test_session.py test_model.py
runs/test_pretrained.py parallel/test_multihost.py test_bad_input.py""".split()
# The laws of the core, within a minute; rematerialised models take the longest to compile.
QUICK = tuple(
    """layers/test_attention.py layers/test_mlp.py layers/test_norm.py layers/test_position.py config/test_config.py
    test_loss.py test_model.py test_optim.py test_train.py""".split()
)
# Where slow tests hold a number of ours: results that are equal bit for bit or to another implementation, kills, the
# programs of TPUs and GPUs. CI runs these, and tests/all.sh the other slow ones.
NUMBERS = tuple(
    """faults/ gguf/ hf/ interventions/ layers/ runs/ sample/ tools/plan/ data/ parallel/test_mesh.py
    parallel/test_multihost.py parallel/test_signals.py tools/test_replay.py test_model.py test_mup.py
    test_old_runs.py test_session.py""".split()
)
# Comparisons with torch, transformers, PEFT and TRL.
PEERS = tuple(
    """hf/test_adapters.py hf/test_conversations.py hf/test_in_and_out.py hf/test_parity.py
    zoo/test_alibi.py zoo/test_differential_attention.py zoo/test_import_hf.py zoo/test_qwen3_next.py
    post/test_trl_parity.py""".split()
)
# Slow tests of CI as well, since each takes seconds and few changes move it.
SECOND = tuple(
    """test_the_examples_of_the_functions test_greedy_tokens_and_activations_are_pythons[quickstart]
    test_samples_evaluates_exports_and_goes_on[muon] test_a_loop_of_known_length_draws_the_same[learned]
    test_the_loss_of_a_model_and_its_gradient test_the_base_is_scored_and_an_export_has_its_context
    test_a_batch_follows_one_grammar test_long_documents_are_cut_where_words_end[bytes-100]
    test_packed_float32_weights_change_nothing test_a_call_that_must_be_has_arguments_that_are_right
    test_after_the_warm_up_nothing_compiles[True] test_a_cache_that_is_named_lies_there_or_nowhere
    test_a_seed_gives_the_text_of_sample test_the_best_loss_so_far_is_that_of_the_checkpoints
    test_places_are_those_of_the_largest test_nobody_there test_a_mistake_is_one_line_and_nothing_is_written[not""".split()
)
# Tests of what lies outside the package are slow, apart from one file of a folder.
OUTSIDE = {"zoo": "", "post": "test_rollouts.py"}
MAPS = 15_000  # of 65,530; without a bound a process of the slow tests came to 59,437
MEMORY = 4 * 2**30  # bytes for each process of the tests; the largest seen took 3


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    tests = Path(__file__).parent
    for item in items:
        path, is_second = item.path.relative_to(tests).as_posix(), item.name.startswith(SECOND)
        if path.startswith(QUICK) and "remat" not in item.name and not item.get_closest_marker("slow"):
            item.add_marker("quick")
        if path.startswith(NUMBERS) or is_second:
            item.add_marker("numbers")
        if path.startswith(PEERS):
            item.add_marker("peers")
        if OUTSIDE.get(item.path.parent.name, item.path.name) != item.path.name or is_second:
            item.add_marker("slow")
    items.sort(key=lambda item: next((n for n, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)))


def pytest_xdist_auto_num_workers():
    """A process for each core, as far as the memory goes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores, memory // MEMORY))
