"""Writes run-before/: runs with ten steps to go, packed, the text that they were trained on, and what comes of them.

`python -m tests.golden.make_run`. It was run with the code of commit f97c505. What later versions write is no old run: when
formats change, make another folder, and keep this one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.record import digest, evaluate_text, export_run, tensors_of

FOLDER = Path(__file__).parent / "run-before"
BEGUN, STEPS = 30, 40
PROMPT = "the old "
NEW_CHARACTERS = 24
MARGIN = 1e-3  # least distance of the likeliest character from the next: rounding is far below
MODELS: dict[str, dict[str, Any]] = {
    "adamw": {"dropout": 0.1, "scan_layers": True},
    "muon": {"norm": "rmsnorm", "position": "rope", "bias": False, "activation": "swiglu", "n_kv_head": 1},
}


def text() -> str:
    draw, lines = random.Random(0), []
    for _ in range(60):
        who, what = draw.choice(["miller", "sailor", "doctor"]), draw.choice(["bread", "ship", "letter"])
        lines.append(f"the old {who} of the {draw.choice(['hill', 'port'])} keeps a {what}")
    return "\n".join(lines) + "\n"


def experiment(name: str) -> Any:
    """The text's path is relative: it is in the working directory, here and wherever the folder is copied to."""
    import jaxgpt

    return jaxgpt.Experiment(
        name=name,
        model=jaxgpt.GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=16, mlp_dim=16, **MODELS[name]),
        data=jaxgpt.DataConfig(path="text.txt"),
        optim=jaxgpt.OptimConfig(
            name="muon" if name == "muon" else "adamw",
            learning_rate=4e-2,
            muon_learning_rate=0.1,
            warmup_steps=2,
        ),
        train=jaxgpt.TrainConfig(
            steps=STEPS, batch_size=8, log_every=1, eval_every=10, checkpoint_every=10, dtype="float32", sample_tokens=0
        ),
    )


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def outcome(run: Path, out: Path | None) -> dict[str, Any]:
    """What a run says before it goes on, and exports, if there is a place for it."""
    import jaxgpt

    loaded = jaxgpt.load(run)
    exported = {}
    if out is not None:
        export_run(run, out)
        exported["tensors"] = digest(tensors_of(out))
    return exported | {
        "step": loaded.step,
        "val_loss": loaded.val_loss,
        "text": loaded.sample(PROMPT, greedy=True, max_new_tokens=NEW_CHARACTERS),
        "loss": evaluate_text(loaded)["loss"],
    }


def margin(run: Path) -> float:
    """Of the greedy text: the least by which a character is likelier than the next, in nats."""
    import jax.numpy as jnp

    import jaxgpt

    loaded, least = jaxgpt.load(run), float("inf")
    ids = loaded.tokenizer.encode(PROMPT + str(loaded.sample(PROMPT, greedy=True, max_new_tokens=NEW_CHARACTERS)))
    for end in range(len(PROMPT), len(ids)):  # as far as the context goes: beyond it, in windows that differ a little
        window = jnp.asarray(ids[max(0, end - 16) : end])[None]
        first, second = sorted(loaded.model.apply({"params": loaded.params}, window)[0, -1].tolist())[:-3:-1]
        least = min(least, first - second) if end <= 16 else least
    return least


def main() -> None:
    import jaxgpt

    expected = {}
    FOLDER.mkdir()
    (FOLDER / "text.txt").write_text(text(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        shutil.copy(FOLDER / "text.txt", "text.txt")
        for name in MODELS:
            run = Path(name)
            jaxgpt.fit(experiment(name), run, progress=False)
            later = {step: loss for step, loss in losses(run).items() if step > BEGUN}
            shutil.rmtree(run / "checkpoints" / str(STEPS))
            lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
            (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= BEGUN))
            for left in (".lock", "loss.png"):
                (run / left).unlink(missing_ok=True)
            assert margin(run) > MARGIN, (name, margin(run))
            expected[name] = outcome(run, Path("out")) | {"losses": later}
            shutil.rmtree("out")
            with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz") as packed:
                packed.add(name, filter=nobodys)
        os.chdir("/")
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
