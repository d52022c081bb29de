"""A run directory is enough: it is used and resumed on any hardware, and without the files it was trained from."""

import dataclasses
import json
import shutil

import chex
import pytest

from jaxgpt.data.dataset import DataConfig
from jaxgpt.data.template import find_template
from jaxgpt.data.template import fingerprint as template_fingerprint
from jaxgpt.data.tokenizer import CharTokenizer
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment, ParallelConfig, TrainConfig
from jaxgpt.lora import LoraConfig
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig
from jaxgpt.parallel.device import find_kernel
from jaxgpt.run import load
from jaxgpt.runs.directory import read_metadata, write_metadata
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.runs.pretrained import resolve_init_from
from jaxgpt.runs.resume import CHANGEABLE
from jaxgpt.tools.evaluate.evaluate import evaluate_run
from jaxgpt.tools.replay import replay
from jaxgpt.training import fit
from tests.conftest import TEXT
from tests.helpers import edit_record, tiny_experiment


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with dropout, of a text and a tokenizer in files, with all its checkpoints."""
    place = tmp_path_factory.mktemp("trained")
    (place / "t.txt").write_text(TEXT)
    (place / "tokenizer.json").write_text(CharTokenizer(TEXT).to_json())
    e = tiny_experiment(place / "t.txt", keep_last=9)
    model = dataclasses.replace(e.model, n_layer=1, dropout=0.2)
    data = dataclasses.replace(e.data, tokenizer=str(place / "tokenizer.json"))
    return fit(dataclasses.replace(e, model=model, data=data), place / "run", progress=False)


@pytest.fixture
def moved(trained, tmp_path):
    """A function that copies the run, as if it had been trained with the given fields of its experiment."""

    def copy(steps=None, **groups):
        run = tmp_path / "moved"
        shutil.copytree(trained.directory, run)
        edit_record(run, lambda record: [record["experiment"][group].update(groups[group]) for group in groups])
        for step in (run / "checkpoints").iterdir():
            if steps is not None and int(step.name) not in steps:
                shutil.rmtree(step)
        return run

    return copy


def logged(directory):
    names = ("step", "loss", "grad_norm", "val_loss")
    return [[x.get(name) for name in names] for x in read_metrics(directory / "metrics.jsonl")]


H200S = {"strategy": "mesh", "data": 1, "fsdp": 8, "micro_batch_size": 64}


@pytest.mark.slow
def test_a_run_of_another_kernel_is_used_as_ever(trained, moved):
    """The model is the one that a run of this device has; one of 16 bits is used in them."""
    run = moved(train={"attention": "cudnn"}, parallel=H200S)
    assert load(run).model == trained.model and replay(run, 2).equal
    shutil.rmtree(run)
    run = load(moved(train={"attention": "splash", "dtype": "bfloat16"}))
    assert (run.model.attention_fn, run.model.dtype) == (find_kernel("plain"), "bfloat16")
    assert evaluate_run(run)["loss"] == pytest.approx(run.val_loss, rel=1e-2)


def test_a_run_of_other_hardware_is_resumed_bit_for_bit(trained, moved, capsys):
    """Its record names a kernel that is not here: the log says which one is used instead. Its mesh is refused, and auto
    takes one device. It is logged and validated at other intervals from then on."""
    run = moved(steps=[2], train={"attention": "cudnn"}, parallel=H200S)
    given = read_metadata(run).given
    train = dataclasses.replace(given.train, log_every=3, eval_every=2, sample_tokens=1)
    with pytest.raises(UserError, match="data=1 x fsdp=8 .* does not make the 1 devices .*--parallel.strategy auto"):
        fit(given, run, progress=False)
    parallel = dataclasses.replace(given.parallel, strategy="auto")
    resumed = fit(dataclasses.replace(given, train=train, parallel=parallel), run, progress=True)
    chex.assert_trees_all_equal(load(run, which="last").params, load(trained.directory, which="last").params)
    before = {line[0]: line[1:3] for line in logged(trained.directory) if line[1] is not None}
    steps = [step for step, loss, *_ in logged(run) if loss is not None]
    assert steps == [1, 2, 3, 6] and all(line[1:3] == before[line[0]] for line in logged(run) if line[1] is not None)
    measured = [(step, val_loss) for step, *_, val_loss in logged(run) if val_loss is not None]
    assert [step for step, _ in measured] == [2, 4, 6] and measured[-1] == (6, logged(trained.directory)[-1][-1])
    assert (resumed.val_loss, resumed.step) == min((val_loss, step) for step, val_loss in measured)
    told = "".join(capsys.readouterr())
    assert "float32, plain attention instead of cudnn (the device is cpu)" in told


def test_every_field_decides_or_is_said_not_to():
    """A new field is to be put where it belongs: here, or into CHANGEABLE."""
    groups = {"data": DataConfig, "optim": OptimConfig, "train": TrainConfig, "lora": LoraConfig}
    groups |= {"model": GPTConfig, "parallel": ParallelConfig}
    fields = {name: {f"{name}.{f.name}" for f in dataclasses.fields(cls)} for name, cls in groups.items()}
    free = {name: {f for f in names if f.startswith(CHANGEABLE)} for name, names in fields.items()}
    deciding = "train.steps train.batch_size train.seed train.init_from train.eval_tokens"
    assert fields["train"] - free["train"] == set(deciding.split())
    assert free["data"] == {"data.path", "data.corpus"} and free["parallel"] == fields["parallel"]
    assert (free["optim"], free["model"], free["lora"]) == (
        {"optim.max_skipped", "optim.muon_dtype"},
        {"model.remat"},
        set(),
    )
    assert all(any(f.startswith(prefix) for f in {"name"}.union(*fields.values())) for prefix in CHANGEABLE)


def test_its_own_tokenizer_stands_in_for_the_file(trained, moved, tmp_path):
    """Where that is gone, and where the copy is named; another one is refused."""
    path, other, start = tmp_path / "lost.json", CharTokenizer(TEXT + "ñ").to_json(), {}
    run = moved(data={"tokenizer": str(path)})
    given, own = read_metadata(run).given, run / "tokenizer.json"

    def named(tokenizer, **groups):
        return dataclasses.replace(given, data=dataclasses.replace(given.data, tokenizer=str(tokenizer)), **groups)

    def refused(message, tokenizer):
        with pytest.raises(UserError, match=message):
            resolve_init_from(named(tokenizer, **start)) if start else fit(named(tokenizer), run, progress=False)

    for tokenizer in (path, own, trained.experiment.data.tokenizer):  # gone, the copy, the file in another place
        assert fit(named(tokenizer), run, progress=False).step == trained.step
    assert evaluate_run(load(run))["loss"] == pytest.approx(trained.val_loss, rel=1e-6)
    refused("no tokenizer at .*typo.json", tmp_path / "typo.json")
    refused("another configuration: data.tokenizer .* -> byte", "byte")
    start = {"train": TrainConfig(init_from=str(run))}
    for tokenizer in ("char", own):
        assert resolve_init_from(named(tokenizer, **start))[0].data.tokenizer == str(own)
    refused("ids is not the tokenizer that .* was trained with", "ids")
    start = {}
    path.write_text(other)
    refused(f"lost.json is not the tokenizer .* trained with.*--data.tokenizer {own}", path)
    own.write_text(other)
    refused("tokenizer.json is not the tokenizer that the run was trained with", own)


@pytest.mark.parametrize("own", [None, "{{ messages[0]['content'] }}"], ids=["ours", "its tokenizer's"])
def test_the_template_of_a_run_is_the_one_it_was_trained_with(tmp_path, own):
    """Not that of the model it starts from, whose files are there already, where its tokenizer is another."""
    tokenizer, model, run = CharTokenizer(TEXT), "{{ 'of the model' }}", tmp_path / "run"
    run.mkdir()
    config = {"bos_token": "<s>", "unk_token": "<unk>", "model_max_length": 9}
    (run / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": model}))
    (run / "chat_template.jinja").write_text(model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": own, "eos_token": "I"}))
    template = find_template(tokenizer, tmp_path)
    data = {"train_sha256": "", "template_sha256": template_fingerprint(template)}
    write_metadata(run, Experiment(name="x"), tokenizer, data=data, vocab_size=9, tokenizer_config=template.config())
    assert template_fingerprint(find_template(tokenizer, run)) == template_fingerprint(template)
    assert json.loads((run / "tokenizer_config.json").read_text())["model_max_length"] == 9


def test_without_its_text_the_tokens_in_the_cache_are_enough(trained, moved, tmp_path, monkeypatch):
    """Without both, what is missing is told, and for which command."""
    run = moved(data={"path": str(tmp_path / "gone.txt")})
    given = read_metadata(run).given
    assert evaluate_run(load(run)) == evaluate_run(trained)
    assert fit(given, run, progress=False).step == trained.step
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "empty"))
    missing = "moved was trained on .*gone.txt, which is neither there nor in the cache .*empty/tokens: "
    for use, words in (
        (lambda: evaluate_run(load(run)), "to evaluate its validation split, put that text back"),
        (lambda: fit(given, run, progress=False), "to train it on, name that text with --data.path"),
        (lambda: replay(run, 1), "to replay a step, put that text back"),
    ):
        with pytest.raises(UserError, match=missing + words):
            use()
    text = dataclasses.replace(given.data, path=trained.experiment.data.path)
    assert fit(dataclasses.replace(given, data=text), run, progress=False).step == trained.step
