"""experiments/post/chat_from_nothing.py: a task in a chat template, and all stages in a small way."""

from jaxgpt.runs.metrics import read_metrics
from tests.helpers import import_pages, replace_fields

chat, tasks = import_pages("post", "chat_from_nothing", "tasks")


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
