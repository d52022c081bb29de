"""Tracking: what reaches a service, once each, from a log that is written, cut off and written again."""

import inspect
import json
import struct
import sys
import types

import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.runs.metrics import MetricsFile, read_metrics, rewind_metrics
from tests.helpers import script
from tests.tools.written_run import STEPS, write_run

module = script("track")
track = module.track


def append(path, *lines):
    log = MetricsFile(path)
    for line in lines:
        log.write(**line)
    log.close()


def loss(step):
    return {"step": step, "loss": 1.0 / step, "mfu": None, "tokens_per_second": 100.0, "seconds": 0.5 * step}


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run", trained=0)
    append(tmp_path / "run/metrics.jsonl", loss(1), loss(2), {"step": 2, "val_loss": 3.0})
    return tmp_path / "run"


def expected(directory):
    lines = read_metrics(directory / "metrics.jsonl")
    return sorted((line["step"], x, line[x]) for line in lines for x in module.SCALARS if line.get(x) is not None)


# The log of a run in training.


def test_lines_are_read_once_whole_and_undamaged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    looks = []

    def half_a_line():
        append(path, loss(1))
        with path.open("ab") as f:
            f.write(b'{"step": 2, "lo')

    def the_rest():
        with path.open("ab") as f:
            f.write(b'ss": 0.5}\n{"step": 3, "loss": 0.1, "crc32": 7}\n')

    def rewound():
        with pytest.warns(UserWarning, match="1 of 3 lines are damaged"):
            rewind_metrics(path, 1)
        append(path, loss(2), loss(3))

    events = iter([half_a_line, the_rest, lambda: None, rewound])

    def pause():
        looks.append([])
        next(events)()

    def is_live():
        if len(looks) == 4:
            append(path, loss(4))  # just before the end
        return len(looks) < 4

    for line in module.iter_new_lines(path, is_live, pause):
        looks[-1].append(line["step"])
    assert looks == [[1], [2], [], [1, 2, 3, 4]]


@pytest.fixture
def kept(monkeypatch):
    """What W&B gets: (step, scalar, value), and None when it is closed."""
    values = []

    def send(step, scalars, time):
        values.extend((step, name, value) for name, value in scalars.items())

    service = send, lambda: None, lambda: values.append(None)
    monkeypatch.setitem(module.SERVICES, "wandb", lambda *_: service)
    return values


def follow(run, monkeypatch, *events):
    """Track a run while the events happen, one between two looks; the run is complete with the last."""
    left = list(events)

    def sleep(seconds):
        left.pop(0)()
        if not left:
            (run / f"checkpoints/{STEPS}").mkdir(parents=True)

    monkeypatch.setattr(module.time, "sleep", sleep)
    return track(run, "wandb", follow=True)


def test_following_a_run_that_is_killed_and_resumed_sends_each_value_once(run, kept, monkeypatch):
    path = run / "metrics.jsonl"

    def resumed():
        rewind_metrics(path, 1)
        append(path, loss(2))

    follow(run, monkeypatch, lambda: append(path, loss(3)), resumed, lambda: append(path, *map(loss, (3, 4))))
    append(path, {"step": 4, "val_loss": 2.0})
    assert track(run, "wandb") == 1 and kept.pop() is None
    assert sorted(filter(None, kept)) == sorted([*expected(run), (2, "val_loss", 3.0)])


def test_following_ends_when_the_run_is_started_over(run, kept, monkeypatch):
    def fresh():
        run.rename(run.with_name("aside"))
        write_run(run)

    with pytest.raises(UserError, match="started over with --fresh"):
        follow(run, monkeypatch, fresh, lambda: None)


def test_a_damaged_record_of_what_was_sent_is_refused(run, kept):
    (run / "tracked-wandb.json").write_text('{"key": "a", "sent": {"loss": "many"}}')
    with pytest.raises(UserError, match="tracked-wandb.json is damaged: delete it"):
        track(run, "wandb")


# TensorBoard.


def events(folder):
    """The events of the one file in a folder, by the format of TFRecord and tensorboardX's own protobuf classes."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = folder.iterdir()
    raw, at = file.read_bytes(), 0
    while at < len(raw):
        (size,) = struct.unpack_from("<Q", raw, at)
        yield Event.FromString(raw[at + 12 : at + 12 + size])
        at += 12 + size + 4


def test_tensorboard_gets_each_value_once_however_often_it_is_called(run):
    pytest.importorskip("tensorboardX", reason="of the extra tensorboard")
    (run / "tensorboard").mkdir()
    (run / "tensorboard/events.out.tfevents.1.earlier").touch()
    for _ in range(2):
        assert track(run, "tensorboard") == len(expected(run))
    found = list(events(run / "tensorboard"))
    scalars = [(e.step, v.tag, v.simple_value) for e in found for v in e.summary.value if v.WhichOneof("value")]
    assert sorted(scalars) == [(step, name, np.float32(value)) for step, name, value in expected(run)]
    times = {e.step: e.wall_time for e in found if e.step}
    assert times[2] - times[1] == pytest.approx(0.5, abs=1e-3)
    tags = {v.tag: v.metadata for e in found for v in e.summary.value}
    assert b"optim.learning_rate" in tags["_hparams_/session_start_info"].plugin_data.content


# W&B and trackio: modules with the signatures that are used.


def fake_wandb(calls):
    class Run:
        def define_metric(self, name, *, step_metric=None):
            calls.append(("metric", name, step_metric))

        def log(self, data):
            calls.append(("log", data.pop("step"), data))

        def finish(self):
            calls.append(("finish",))

    def init(*, project, name, id, resume, config, settings):
        assert resume == "allow" and settings == {"console": "off", "x_disable_stats": True, "x_disable_meta": True}
        calls.append(("init", project, name, id, config))
        return Run()

    return types.SimpleNamespace(init=init, Settings=dict, Error=RuntimeError)


def fake_trackio(calls):
    class Run:
        def log(self, metrics, step):
            calls.append(("log", step, metrics))

        def finish(self):
            calls.append(("finish",))

    def init(*, project, name, config, resume, embed, auto_log_gpu, auto_log_cpu):
        assert resume == "allow" and not (embed or auto_log_gpu or auto_log_cpu)
        calls.append(("init", project, name, name.rpartition("-")[2], config))
        return Run()

    return types.SimpleNamespace(init=init)


@pytest.mark.parametrize(("name", "fake"), [("wandb", fake_wandb), ("trackio", fake_trackio)])
def test_a_second_call_continues_the_run_with_what_is_new(run, monkeypatch, name, fake):
    calls = []
    monkeypatch.setitem(sys.modules, name, fake(calls))
    first = track(run, name, project="mine")
    append(run / "metrics.jsonl", loss(3))
    assert first + 2 == len(expected(run)) and track(run, name, project="mine") == 2
    one, two = [call for call in calls if call[0] == "init"]
    assert one == two and one[1] == "mine" and one[4]["model.n_layer"] == 1
    assert one[3] == json.loads((run / f"tracked-{name}.json").read_text())["key"]
    logged = [
        (step, x, value) for _, step, values in (c for c in calls if c[0] == "log") for x, value in values.items()
    ]
    assert sorted(logged) == expected(run)
    assert calls[-1] == ("finish",)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fake"), [("wandb", fake_wandb), ("trackio", fake_trackio)])
def test_the_installed_package_has_the_arguments_that_are_used(name, fake):
    package = pytest.importorskip(name, reason=f"needs the {name} package")
    used = inspect.signature(fake([]).init).parameters
    assert used.keys() <= inspect.signature(package.init).parameters.keys()


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio",) * 2])
def test_a_missing_package_is_named(run, monkeypatch, capsys, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as left:
        module.main([str(run), "--to", name])
    assert left.value.code == 2 and f"python -m pip install {package}" in capsys.readouterr().err


def test_an_account_that_is_missing_is_said_in_a_line(run, monkeypatch):
    def refuse(**_):
        raise RuntimeError("No API key configured. Use `wandb login` to log in.\nsecond line")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse, Settings=dict, Error=RuntimeError))
    with pytest.raises(UserError, match="W&B: No API key configured"):
        track(run, "wandb")
