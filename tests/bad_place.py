"""The directory in which the table of bad inputs runs: bad texts, token files, tokenizers, experiments and runs."""

import json
import os
import shutil
from pathlib import Path

from tests.bad_models import prepare_models
from tests.conftest import TEXT

GOOD = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
FILES: dict[str, str | bytes] = {
    "t.txt": TEXT,
    "latin1.txt": "año de la lanza ".encode("latin-1") * 50,
    "short.txt": "too short",
    "half.jsonl": GOOD + GOOD[:20],
    "syntax.py": "experiment = (\n",
    "raises.py": "x = 1\nraise RuntimeError('no luck')\n",
    "with a file/notes.md": "not a run",
}


def prepare_place(place: Path, run: Path) -> None:
    """run: a trained one, of which the damaged are made."""
    for name, held in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(held.encode() if isinstance(held, str) else held)
    shutil.copytree(run, place / "runs/tiny", symlinks=True)
    _runs(place)
    prepare_models(place / "models")
    os.mkfifo(place / "pipe")
    (place / "loop").symlink_to("loop")


def _runs(place: Path) -> None:
    good = place / "runs/tiny"
    whole = (good / "experiment.json").read_text()
    record = json.loads(whole)
    changed = json.dumps(record | {"vocab_size": record["vocab_size"] + 1})
    del record["sha256"]  # what is not told by it has to be told without
    e = record["experiment"]
    wide = json.dumps(record | {"experiment": e | {"model": e["model"] | {"n_embd": 2**60}}})
    texts = {"half": json.dumps(record)[:200], "changed": changed, "width": wide, "no_checkpoint": whole}
    for name, text in texts.items():
        directory = place / "broken" / name
        directory.mkdir(parents=True)
        (directory / "experiment.json").write_text(text)
        shutil.copy(good / "tokenizer.json", directory)
