"""experiments/post/chat_from_nothing.py: a task in a chat template, and all stages in a small way."""

import json

import numpy as np

from jaxgpt.data.conversations import encode_all
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.runs.metrics import read_metrics
from tests.helpers import import_pages, replace_fields

chat, tasks = import_pages("post", "chat_from_nothing", "tasks")


def test_a_row_of_a_task_is_the_conversation(tmp_path):
    """So that GRPO goes on where training on conversations ended, and the server asks in the same form."""
    task, tokenizer, prompt = chat.SumsConfig(tokenizer="byte"), ByteTokenizer(), "What is 7 + 8 + 5?"
    form = tasks.Form(task, tokenizer)
    assert form.decode(form.encode(prompt)) == prompt
    turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": task.answer(prompt)})
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    ((ids, answers),) = encode_all(tmp_path / "chats.jsonl", tokenizer, form.template)
    inputs, targets, mask, _ = tasks.make_row(form.encode(prompt), form.encode_answer("20"), len(ids) - 1, prompt)
    np.testing.assert_array_equal(inputs, ids[:-1])
    np.testing.assert_array_equal(targets[mask], ids[1:][answers[1:]])
    assert form.tokenizer.decode(targets[mask][:-1].tolist()) == "20"


def test_all_stages_run_and_go_on(tmp_path, monkeypatch):
    make = chat.make_stages

    def small(root, share):
        model = {"n_layer": 1, "n_head": 2, "n_embd": 16}
        stages = {name: replace_fields(stage, model=model) for name, stage in make(root, share).items()}
        stages["grpo"] = replace_fields(stages["grpo"], train={"batch_size": 16, "log_every": 1})
        return stages

    monkeypatch.setattr(chat, "make_stages", small)
    monkeypatch.setattr(chat, "read_docstrings", lambda: chat.find_corpus_files("python-docs")[0].read_text())
    monkeypatch.setattr(chat, "QUESTIONS", chat.QUESTIONS[:1])
    for _ in range(2):
        chat.main(["--run-dir", str(tmp_path), "--share", "0.001"])
    assert "What is 7 + 8 + 5?" in (tmp_path / "index.html").read_text()
    assert {"model.html", "model.gguf"} <= {path.name for path in tmp_path.iterdir()}
    assert [line["reward"] for line in read_metrics(tmp_path / "grpo" / "metrics.jsonl") if "reward" in line]
