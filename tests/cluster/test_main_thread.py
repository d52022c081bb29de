"""What the watchdog does not count: a compilation, and a person in a debugger."""

import pdb
import threading

import jax
import numpy as np

from jaxgpt.cluster.main_thread import COMPILING, MainThread


def test_a_debugger_is_seen():
    class Shell(pdb.Pdb):
        def cmdloop(self, *_):
            looked.append(MainThread().is_debugged())

    looked = [MainThread().is_debugged()]
    shell = Shell(nosigint=True, readrc=False)
    shell.runcall(lambda: None)
    assert looked[0] is False and looked[1:] and all(looked[1:])


def test_a_compilation_is_seen_while_it_lasts():
    """By `jax.monitoring`, whose functions are public and whose events' names are not: seen with JAX 0.10.0 to 0.12.0.1.

    Each part of a compilation is between two of them, in the thread that compiles.
    """
    seen = []

    def event(name, *_, **__):
        seen.append((name.removeprefix(COMPILING), main.is_compiling()))

    def traced(x):
        seen.append(("traced", main.is_compiling()))
        return x * 3 + 1

    main = MainThread()
    with main.listening():
        jax.monitoring.register_scalar_listener(event)
        jax.monitoring.register_event_time_span_listener(event)
        try:
            x = np.ones(3)
            jax.jit(traced)(x)
            thread = threading.Thread(target=jax.jit(lambda x: traced(x + 1)), args=[x])  # is none of the main thread's
            before = len(seen)
            thread.start()
            thread.join()
        finally:
            jax.monitoring.unregister_scalar_listener(event)
            jax.monitoring.unregister_event_time_span_listener(event)
    trace, lower, build = "jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration"
    said = f"JAX {jax.__version__} does not record the events of a compilation as JAX 0.10.2 does"
    parts = [
        (trace, True),
        ("traced", True),
        (trace, False),
        (lower, True),
        (lower, False),
        (build, True),
        (build, False),
    ]
    assert seen[:before] == parts, said
    assert ("traced", False) in seen[before:] and {count for _, count in seen[before:]} == {False}
