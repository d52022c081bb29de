"""How far does a chat model get in half an hour on two cores, from nothing but what is installed?

Reference   nanochat's runs/runcpu.sh (github.com/karpathy/nanochat at 92d63d4): tokenizer, pretraining and conversations on
            a CPU. It stops at conversations, and downloads its data.
Data        the docstrings of Python's standard library and of the packages that jaxgpt installs, 11.5 million characters
            of English with code. Conversations are made here: questions about Python with the first sentence of the
            answer in its reference, words to spell, and sums of three digits. GRPO is rewarded for right sums.
Stages      a BPE of 2,048 tokens and pretraining; the conversations; GRPO on sums. A tenth of all sums is held out from
            both. Each stage is a run of its own, and the same command goes on where it was interrupted.
Command     python experiments/post/chat_from_nothing.py            everything, in runs/chat-from-nothing
            jaxgpt serve runs/chat-from-nothing/grpo                the chat in a browser
Expected    Sentences about Python that read well and are wrong, and nine sums in ten right.
Result      30 minutes on two shared cores of an AMD EPYC (family 25, model 17, AVX-512), jax 0.12.0.1, 2026-11-25: 24 of
            pretraining, 2 of conversations, 4 of GRPO and the pages, when the reference still was the whole one of the
            installed Python, with 229 questions. The held-out text has 1.5150 bits per byte. Of 256
            held-out sums 75.0% are right after the conversations, and 80.1% after GRPO. nanochat with the same text and
            conversations, and about that time (4 layers of width 256, 5.2M parameters, 1,250 steps of 4,096 tokens):
            52.0% of the sums, and 1.4995 bits per byte in rows that begin with documents, as it was trained. In windows one
            after the other, as ours are, it has 1.7177, and never saw such in training.
Verdict     Half an hour is enough for all stages. Sentences read well and are wrong, as expected, and eight sums in ten are
            right, not nine. Which of the two predicts the text better cannot be said, since their figures are of two kinds. GRPO's
            five points, at the best of its steps, are less than two standard errors of such a difference, and prove
            nothing. LOG.md has what else was tried.
"""

import argparse
import ast
import dataclasses
import html
import json
import runpy
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from grpo import GRPOConfig
from rollouts import RolloutConfig
from tasks import EXAMPLES, AccuracyConfig, TaskConfig

import jaxgpt
from jaxgpt import DataConfig, Experiment, GPTConfig, OptimConfig, TrainConfig
from jaxgpt.config.validate import PositiveInt
from jaxgpt.data.corpus import find_corpus_files

PACKAGES = ("flax", "jax", "numpy", "optax", "orbax", "scipy")  # what jaxgpt needs
QUESTIONS = ("What is 7 + 8 + 5?", "What is 9 + 9 + 6?", "Spell array.", "What is str.count?", "Hello!")
SUMS, WORDS = 1500, 600  # conversations of each kind


def read_docstrings(packages: tuple[str, ...] = PACKAGES) -> str:
    """Return Python's reference, and the docstrings of the standard library and of packages, each once."""
    folders = [Path(sysconfig.get_path("stdlib")), *(Path(sysconfig.get_path("purelib")) / name for name in packages)]
    (reference,) = find_corpus_files("python-docs")
    found = {reference.read_text(): None}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if any("test" in part or part == "site-packages" for part in path.relative_to(folder).parts):
                continue
            try:
                with warnings.catch_warnings(action="ignore"):  # about old escapes
                    tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):  # made to be wrong, for other tools
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    text = ast.get_docstring(node)
                    if text and len(text) > 80 and text.isascii():
                        found[text] = None
    return "\n\n".join(found) + "\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumsConfig(TaskConfig):
    """Questions for the sum of three digits."""

    chat: bool = True

    def prompt(self, rng: np.random.Generator) -> str:
        """Return a question."""
        return "What is {} + {} + {}?".format(*rng.integers(1, 10, 3))

    def answer(self, prompt: str) -> str:
        """Return the sum."""
        return str(sum(int(word) for word in prompt.strip("?").split() if word.isdigit()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumRolloutsConfig(SumsConfig, RolloutConfig):
    """Sums that the model answers itself."""

    max_new_tokens: PositiveInt = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig(AccuracyConfig, GRPOConfig):
    """GRPO, validated by the share of wrong answers."""


def make_conversations(text: str) -> str:
    """Return conversations as JSON lines, in an order that is fixed: about Python, spelling, sums, greetings."""
    rng, sums = np.random.default_rng(0), SumsConfig()
    program = runpy.run_path(str(Path(__file__).parents[1] / "python_questions.py"))
    pairs = [("Hello!", "Hello! Ask me about Python, or for a sum.")] * 10
    words = sorted({word for word in text[: 10**6].split() if word.isalpha() and word.islower() and 2 < len(word) < 8})
    pairs += [(f"Spell {word}.", "-".join(word)) for word in rng.choice(words, WORDS)]
    pairs += [(prompt := sums.draw_prompt(n, 0, EXAMPLES), sums.answer(prompt)) for n in range(SUMS)]
    lines = [
        json.dumps({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]})
        for q, a in pairs
    ]
    lines += program["make_questions"]().splitlines()
    return "\n".join(lines[i] for i in rng.permutation(len(lines))) + "\n"


def make_stages(root: Path, share: float = 1.0) -> dict[str, Experiment]:
    """Return the three stages. share: the factor for the number of steps of each."""

    def steps(number: int) -> int:
        return max(2, round(share * number))

    model = GPTConfig(
        block_size=128,
        n_layer=6,
        n_head=6,
        n_embd=192,
        bias=False,
        norm="rmsnorm",
        activation="swiglu",
        position="rope",
        qk_norm=True,
        residual_init="zero",
    )
    pretrain = Experiment(
        name="pretrain",
        model=model,
        data=DataConfig(path=str(root / "text.txt"), tokenizer="bpe", bpe_vocab_size=2048),
        optim=OptimConfig(
            name="muon",
            learning_rate=3e-3,
            muon_learning_rate=0.01,
            schedule="wsd",
            decay_fraction=0.4,
            min_lr_ratio=0.0,
        ),
        train=TrainConfig(steps=steps(2600), batch_size=16, eval_every=steps(520), eval_tokens=65536),
    )
    sft = dataclasses.replace(
        pretrain,
        name="sft",
        data=DataConfig(path=str(root / "conversations.jsonl")),
        optim=OptimConfig(learning_rate=1e-3),
        train=TrainConfig(
            init_from=str(root / "pretrain"),
            steps=steps(200),
            batch_size=16,
            eval_every=steps(50),
            sample_prompt=QUESTIONS[0],
        ),
    )
    grpo = dataclasses.replace(
        sft,
        name="grpo",
        data=SumRolloutsConfig(row=28),  # a question and its answer
        objective=PolicyConfig(),
        optim=OptimConfig(learning_rate=1e-5, schedule="constant", weight_decay=0.0),
        train=dataclasses.replace(
            sft.train, init_from=str(root / "sft"), steps=steps(120), batch_size=128, eval_every=steps(20)
        ),
    )
    return {"pretrain": pretrain, "sft": sft, "grpo": grpo}


def write_report(root: Path, runs: dict[str, jaxgpt.Run]) -> None:
    """Write index.html: the validation loss of each stage, and what it says to the same questions."""
    rows = []
    for name, run in runs.items():
        chat = name != "pretrain"
        texts = [run.sample(q, chat=chat, greedy=True, max_new_tokens=60) for q in QUESTIONS]
        cells = "".join(f"<td><pre>{html.escape(text.strip())}</pre></td>" for text in texts)
        rows.append(f"<tr><th>{name}<br>{run.val_loss:.4f}<br>{run.experiment.objective.unit}</th>{cells}</tr>")
    asked = "".join(f"<th>{html.escape(q)}</th>" for q in QUESTIONS)
    table = f"<table border=1><tr><th>stage, validation loss</th>{asked}</tr>{''.join(rows)}</table>"
    links = '<p><a href="model.html">The model in the browser</a> · model.gguf for llama.cpp</p>'
    (root / "index.html").write_text(
        "<!doctype html><meta charset=utf-8><title>chat from nothing</title><style>pre { white-space: pre-wrap }</style>"
        f"{table}{links}"
    )


def main(words: Sequence[str] | None = None) -> None:
    """Run all stages, and write the report, the page of the model and the GGUF file. words: the arguments of the command line."""
    parser = argparse.ArgumentParser(description="Make a chat model from nothing.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/chat-from-nothing"))
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of each stage")
    options = parser.parse_args(words)
    root = options.run_dir
    root.mkdir(parents=True, exist_ok=True)
    for name, make in (
        ("text.txt", read_docstrings),
        ("conversations.jsonl", lambda: make_conversations((root / "text.txt").read_text())),
    ):
        if not (root / name).exists():
            (root / name).write_text(make())
    runs = {name: jaxgpt.fit(stage, root / name) for name, stage in make_stages(root, options.share).items()}
    write_report(root, runs)
    from jaxgpt.tools.convert import export_gguf
    from jaxgpt.tools.xray.live import make_page

    (root / "model.html").write_text(make_page(runs["grpo"], QUESTIONS[0]))
    if not (root / "model.gguf").exists():
        export_gguf(root / "grpo", root / "model.gguf")
    print(f"{root / 'index.html'}: what each stage says; jaxgpt serve {root / 'grpo'} is the chat")


if __name__ == "__main__":
    main()
