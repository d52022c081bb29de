"""`sessions.jsonl`: the step from which each session trained a run, what it logged, and on what it computed.

A resumed run may log at other intervals and compute on other hardware than `experiment.json` says.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax

from jaxgpt.config import Experiment
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, parse_json, read_bytes, render_json, write_whole
from jaxgpt.parallel.device import device_kind
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.runs.metadata import RunMetadata

CPUINFO = Path("/proc/cpuinfo")
# Linux's names of vector instructions, widest first, and of matrix instructions.
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sve": "SVE", "asimd": "NEON"}
MATRICES = {"amx_tile": "AMX", "sme": "SME"}
MOST_BYTES = 2**24  # longest file to read: about 20,000 sessions


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionRecord:
    """One session of a run: from its first process to an interruption or the end."""

    step: int  # steps before it; 0: it started the run
    log_every: int
    eval_every: int
    computation: dict[str, Any] | None  # see `describe_computation`. None: not recorded


def describe_computation(experiment: Experiment, trainer: Trainer) -> dict[str, Any]:
    """Return all that decides the rounding of a step besides the experiment: equal descriptions give equal bits."""
    parallel = experiment.parallel
    return {
        **{name: importlib.metadata.version(name) for name in ("jaxgpt", "jax", "jaxlib", "flax", "optax")},
        "device": device_kind(),
        "processor": describe_processor(),
        "xla_flags": os.environ.get("XLA_FLAGS", "").strip(),
        "devices": len(trainer.strategy.devices),
        "processes": jax.process_count(),
        "strategy": trainer.strategy.name,
        "micro_batch_size": trainer.split.micro_batch_size,
        "dtype": str(trainer.options.dtype),
        "attention": trainer.options.attention,
        "remat": experiment.model.remat,
        "loss_chunk": parallel.loss_chunk,
        "loss_kernel": parallel.loss_kernel,
    }


def record_session(directory: Path, experiment: Experiment, trainer: Trainer, step: int) -> None:
    """Add the session that resumes from `step`. Sessions from later steps are removed: their steps are taken again."""
    train = experiment.train
    begun = SessionRecord(
        step=step,
        log_every=train.log_every,
        eval_every=train.eval_every,
        computation=describe_computation(experiment, trainer),
    )
    kept = [session for session in _read(directory) if session.step < step]
    lines = (render_json(dataclasses.asdict(session)) for session in (*kept, begun))
    write_whole(_path(directory), "".join(f"{line}\n" for line in lines))


def read_sessions(metadata: RunMetadata) -> list[SessionRecord]:
    """Return the sessions in order, the first from step 0, as `experiment.json` has it if it was not recorded."""
    sessions, train = _read(metadata.directory), metadata.experiment.train
    if sessions and sessions[0].step == 0:
        return sessions
    first = SessionRecord(step=0, log_every=train.log_every, eval_every=train.eval_every, computation=None)
    return [first, *sessions]


def _path(directory: Path) -> Path:
    return directory / "sessions.jsonl"


def _read(directory: Path) -> list[SessionRecord]:
    """Return the recorded sessions. Raises `UserError` if the file is damaged."""
    path = _path(directory)
    if not is_there(path, "It holds the run's sessions."):
        return []
    sessions = []
    for raw in read_bytes(path, MOST_BYTES).splitlines():
        match parse_json(raw, str(path)):
            case {"step": int(), "log_every": int(), "eval_every": int(), "computation": dict() | None} as line:
                sessions.append(SessionRecord(**{f.name: line[f.name] for f in dataclasses.fields(SessionRecord)}))
            case _:
                raise UserError(f"{path} is damaged: a line is not of a session. Delete it to resume without it.")
    steps = [session.step for session in sessions]
    if steps != sorted(set(steps)) or any(min(s.step + 1, s.log_every, s.eval_every) < 1 for s in sessions):
        raise UserError(f"{path} is damaged: its sessions are not in order. Delete it to resume without it.")
    return sessions


def describe_processor() -> str:
    """Return family, vector width and usable cores: "GenuineIntel family 6 model 167, AVX-512 and AMX, 2 cores"."""
    fields = _read_cpuinfo()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    model = fields.get("model") or fields.get("CPU part")
    maker = fields.get("vendor_id") or fields.get("CPU implementer") or platform.processor() or "unknown"
    family = fields.get("cpu family") or platform.machine()
    name = f"{maker} family {family}" + (f" model {model}" if model else "")
    width = next((name for flag, name in VECTORS.items() if flag in flags), None)
    units = [*([width] if width else []), *(name for flag, name in MATRICES.items() if flag in flags)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ", ".join([name, *([" and ".join(units)] if units else []), f"{cores} core{'s' * (cores > 1)}"])


def _read_cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor. Without Linux's file, none."""
    try:
        first = CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
