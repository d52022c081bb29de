"""Run directories without training: what training would have written."""

from jaxgpt.data.dataset import DataConfig
from jaxgpt.data.tokenizer import CharTokenizer, fingerprint
from jaxgpt.experiment import Experiment, TrainConfig
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.runs.directory import write_metadata
from jaxgpt.runs.metrics import MetricsFile

TOKENIZER = CharTokenizer("abcd")
STEPS, SKIPS = 10, 3


def write_run(directory, *, trained=STEPS, done=None, last=(), imported=None):
    """Write a run as training would. trained: steps taken. done: step of its checkpoint. last: its last lines."""
    directory.mkdir(parents=True)
    experiment = Experiment(
        name="one",
        model=GPTConfig(block_size=8, n_layer=1, n_head=1, n_embd=4),
        data=DataConfig(path="t.txt"),
        optim=OptimConfig(max_skipped=SKIPS),
        train=TrainConfig(steps=STEPS, batch_size=2),
    )
    data = {"tokenizer_sha256": fingerprint(TOKENIZER)}
    write_metadata(directory, experiment, TOKENIZER, data=data, vocab_size=4, imported=imported)
    if imported is None:
        log = MetricsFile(directory / "metrics.jsonl")
        for step in range(1, trained + 1):
            log.write(step=step, tokens=16 * step, loss=3.0, tokens_per_second=None if step == 1 else 100.0 * step)
            if step % 2 == 0:
                log.write(step=step, val_loss=abs(step - 4) + 1.25)
        for line in last:
            log.write(**line)
        log.close()
    if done is not None:
        (directory / "checkpoints" / str(done)).mkdir(parents=True)
