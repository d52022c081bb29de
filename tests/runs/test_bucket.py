"""A run in a bucket: whatever request is the last one, another machine goes on with the same numbers."""

import contextlib
import errno
import itertools
import json
import random
import sys
import time
from pathlib import Path

import chex
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jaxgpt.cli.main import main
from jaxgpt.errors import CheckpointSaveError, UserError
from jaxgpt.parallel import multihost
from jaxgpt.run import load
from jaxgpt.runs import bucket as module
from jaxgpt.runs.bucket import Bucket, address_of, name_of
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.directory import find_run, is_run
from jaxgpt.tools.overview import runs
from jaxgpt.training import fit
from tests.helpers import logged, tiny_experiment
from tests.runs.gcs_server import GcsServer

ADDRESS, ROOT = "gs://bucket/runs/a", "/bucket/runs/a"


class Killed(BaseException):
    """Nothing catches it."""


class Store(MemoryFileSystem):
    """fsspec's memory. `fails` returns what a request raises, and `states` has the contents after each."""

    cachable = False

    def __init__(self, contents=()):
        super().__init__(global_store=False)
        self.fails, self.states = lambda name, path: None, [{}]
        for path, content in dict(contents).items():
            MemoryFileSystem.pipe_file(self, path, content)

    def contents(self):
        return {path: f.getvalue() for path, f in self.store.items()}

    def put_file(self, lpath, rpath, **kwargs):
        self.pipe_file(rpath, Path(lpath).read_bytes())  # whole or not at all, as in a bucket

    def fail_after(self, number, error):
        count = itertools.count()
        self.fails = lambda name, path: error if next(count) >= number else None


def watch(name):
    def watched(self, path, *args, **kwargs):
        error = self.fails(name, path)
        if error is not None:
            raise error
        done = getattr(MemoryFileSystem, name)(self, path, *args, **kwargs)
        if self.contents() != self.states[-1]:
            self.states.append(self.contents())
        return done

    setattr(Store, name, watched)


for request in ("find", "cat_file", "get_file", "pipe_file", "rm_file"):
    watch(request)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Go on at a machine, by default one with an empty cache, which sees a store."""
    numbers = itertools.count()
    monkeypatch.setattr(module, "STALE", 0.0)
    monkeypatch.setattr(module, "PAUSES", (0.0,) * 6)

    def change(store, number=None):
        number = next(numbers) if number is None else number
        monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / f"machine {number}"))
        monkeypatch.setattr(fsspec, "filesystem", lambda protocol: store)
        return store

    return change


def check_equal(run, expected):
    assert logged(run.directory) == logged(expected.directory)
    chex.assert_trees_all_equal(run.params, expected.params)


def find_step(contents, machine, expected):
    """Return the step at which another machine goes on, after checking all that it finds."""
    machine(Store(contents))
    bucket = Bucket(ADDRESS)
    bucket.pull()
    checkpoints = Checkpoints(bucket.directory / "checkpoints")
    for step in checkpoints.steps():
        checkpoints.verify(step)
    step = checkpoints.rewind()
    found = {path.name for path in bucket.directory.iterdir()}
    assert {"experiment.json", "tokenizer.json"} <= found if is_run(bucket.directory) else not found
    ours, theirs = ([x for x in logged(run.directory) if x["step"] <= step] for run in (bucket, expected))
    assert not step or ours == theirs
    return step


@pytest.mark.slow
@pytest.mark.numbers
def test_a_kill_between_any_two_requests_leaves_a_whole_run(machine, text_file):
    experiment = tiny_experiment(text_file, keep_last=1, eval_every=2)

    def train(contents):
        store = machine(Store(contents))
        return fit(experiment, ADDRESS, progress=False), store.contents(), store.states[1:]

    run, whole, states = train({})
    small = {f"{ROOT}/{name}" for name in ("experiment.json", "tokenizer.json", "metrics.jsonl", "loss.png")}
    assert {path for path in whole if "/checkpoints/6/" not in path} == small
    killed = {find_step(state, machine, run): state for state in states}  # the last state for each step
    assert list(killed) == [0, 2, 4, 6]
    for step, state in killed.items():
        resumed, after, states = train(state)
        check_equal(resumed, run)
        assert {path for path in after if "/d/" not in path} == {path for path in whole if "/d/" not in path}
        found = [find_step(state, machine, run) for state in states]
        assert found == sorted(found) and found[0] == step


@pytest.mark.parametrize("number", [3, 30, 60])
def test_a_killed_process_goes_on_from_its_own_copy(machine, text_file, number, tiny_run):
    store = machine(Store())
    store.fail_after(number, Killed())
    with pytest.raises(Killed):
        fit(tiny_experiment(text_file), ADDRESS, progress=False)
    store = machine(Store(store.contents()), number=0)
    store.fails = lambda name, path: AssertionError("a download") if name == "get_file" else None
    check_equal(fit(tiny_experiment(text_file), ADDRESS, progress=False), tiny_run)


def test_a_store_that_fails_now_and_then_stops_nothing(machine, text_file, tiny_run):
    store, draw = machine(Store()), random.Random(0)
    error, first = OSError("slow down"), f"{ROOT}/checkpoints/2/manifest.json"
    store.fails = lambda name, path: error if first in store.store and draw.random() < 0.1 else None
    check_equal(fit(tiny_experiment(text_file), ADDRESS, progress=False), tiny_run)
    assert find_step(store.contents(), machine, tiny_run) == 6


def test_what_could_not_be_sent_is_sent_by_the_same_command(machine, text_file, tiny_run, caplog):
    experiment, store, taken = tiny_experiment(text_file), machine(Store()), []
    store.fail_after(30, PermissionError("the token has expired"))
    with pytest.raises(
        CheckpointSaveError, match=f"{ADDRESS} lacks the end of the run: the token has expired. .*machine 0"
    ):
        fit(experiment, ADDRESS, progress=False)
    assert "lacks the last checkpoint, and the next one sends it: the token has expired" in caplog.text
    assert find_step(store.contents(), machine, tiny_run) < 6
    store.fails = lambda name, path: None
    machine(store, number=0)
    with pytest.raises(UserError, match="train.seed 0 -> 7"):  # which leaves all as it is
        fit(tiny_experiment(text_file, seed=7), ADDRESS, progress=False)
    check_equal(fit(experiment, ADDRESS, progress=False, callbacks=[taken.append]), tiny_run)
    assert not taken and find_step(store.contents(), machine, tiny_run) == 6


@pytest.mark.slow
@pytest.mark.numbers
def test_one_process_trains_a_run_and_others_read_it(machine, text_file, monkeypatch, capsys, tmp_path):
    experiment, store, seen = tiny_experiment(text_file), machine(Store()), []
    for name, seconds in (("RENEW", 0.01), ("POLL", 0.1)):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.chdir(tmp_path)

    def look(line):
        if line.get("saved") != 6:
            return
        while f"{ROOT}/checkpoints/6/manifest.json" not in store.store:
            time.sleep(0.01)
        for number in (0, None):  # here, and elsewhere
            machine(store, number)
            monkeypatch.setattr(module, "STALE", 10.0)
            with pytest.raises(
                UserError, match=rf"^{ADDRESS} is being trained by another process \(process \d+ on .*\Z"
            ):
                fit(experiment, ADDRESS)
            seen.append(
                [load(ADDRESS).step > 0, *[(row["name"], row["status"]) for row in runs("gs://bucket").to_json()]]
            )
            main(["report", ADDRESS, "--tokens", "4"])
            Path("report.html").unlink()
        machine(store, 0)

    fit(experiment, ADDRESS, progress=False, callbacks=[look])
    assert seen == [[True, (ADDRESS, "training")]] * 2
    machine(store)
    (row,), again = runs("gs://bucket/runs").to_json(), runs(ADDRESS).to_json()
    assert again == [row] and runs("gs://bucket/none").to_json() == []
    assert (row["name"], row["status"], row["step"], row["problem"]) == (ADDRESS, "complete", 6, None)
    assert not list(module.cache_directory().rglob("rest"))  # no arrays
    capsys.readouterr()
    main(["sample", ADDRESS, "--prompt", "a", "--max-new-tokens", "4"])
    assert capsys.readouterr().out.startswith("a")

    def steal(line):
        if line.get("saved") == 2:
            lease = json.loads(store.cat_file(f"{ROOT}/.lease"))
            store.pipe_file(f"{ROOT}/.lease", json.dumps(lease | {"token": "other"}).encode())

    store = machine(Store())
    with pytest.raises(CheckpointSaveError, match="is being trained by another process now, so this one ends"):
        fit(experiment, ADDRESS, progress=False, callbacks=[steal])
    assert f"{ROOT}/.lease" in store.store


@pytest.mark.slow
@pytest.mark.numbers
def test_the_command_line_names_the_address(machine, text_file, capsys):
    store = machine(Store())
    model = "--model.n-layer 1 --model.n-head 2 --model.n-embd 8 --model.block-size 32 --train.batch-size 4"
    options = f"--data.path {text_file} --train.steps 2 --train.sample-tokens 4 {model}"
    main(f"train --run-dir {ADDRESS} {options}".split())
    assert f"next: jaxgpt sample {ADDRESS} --prompt" in capsys.readouterr().out
    assert f"{ROOT}/sample.txt" in store.store
    machine(store)
    main(["train", "--run-dir", ADDRESS])
    assert "continuing at step 2 of 2" in capsys.readouterr().err
    tuned = fit(tiny_experiment(text_file, init_from=ADDRESS, steps=1), "s3://other/b", progress=False)
    assert tuned.metadata.origin.step == 2 and name_of(tuned.directory) == "s3://other/b"


def refused(said, function, *args, **kwargs):
    with pytest.raises(UserError, match=rf"^[^\n]*{said}[^\n]*\Z"):
        function(*args, **kwargs)


@pytest.mark.parametrize(
    "request_, part, error, said",
    [
        (
            "pipe_file",
            ".lease",
            PermissionError("Forbidden: bucket\nmore"),
            "cannot train in {}: Forbidden: bucket. Check",
        ),
        ("pipe_file", "tokenizer.json", PermissionError("Forbidden"), "cannot write {}: Forbidden. Check"),
        ("get_file", "", OSError(errno.ENOSPC, "No space left on device"), "cannot train in {}: .*No space left"),
    ],
)
def test_what_a_store_or_a_disk_refuses_is_one_line(machine, text_file, request_, part, error, said):
    store, experiment = machine(Store()), tiny_experiment(text_file, steps=1)
    if request_ == "get_file":
        fit(experiment, ADDRESS, progress=False)
        machine(store)
    store.fails = lambda name, path: error if name == request_ and part in path else None
    refused(said.format(ADDRESS), fit, experiment, ADDRESS)
    assert f"{ROOT}/.lease" not in store.store
    refused(f"cannot read {ADDRESS}: .*No space left" if request_ == "get_file" else "is not a run", load, ADDRESS)


def test_what_is_no_run_in_a_bucket_is_refused(machine, text_file, monkeypatch, tiny_run):
    left = "x" * (tiny_run.directory / "tokenizer.json").stat().st_size  # by a process that was killed at once
    files = {"/bucket/other/x.bin": b"1", f"{ROOT}/tokenizer.json": left.encode()}
    store, experiment = machine(Store(files)), tiny_experiment(text_file)
    refused("gs://bucket/other holds other files and no run", fit, experiment, "gs://bucket/other")
    refused("gs://bucket/none is not a run directory", load, "gs://bucket/none")
    for address in ("memory://bucket/a", "gs://a::memory://b", "gs://", "http://host/run"):
        refused("is not in a bucket", fit, experiment, address)
        refused("is not in a bucket", load, address)
    fit(experiment, ADDRESS, progress=False)
    refused("which --fresh does not move", fit, experiment, ADDRESS, fresh=True)
    store.store[f"{ROOT}/x/../../../../escaped"] = store.store[f"{ROOT}/tokenizer.json"]
    machine(store)
    assert find_run(Path(ADDRESS)) == find_run(f"{ADDRESS}/") == load(ADDRESS).directory
    assert not list(module.cache_directory().parent.rglob("escaped"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fsspec", None)
        refused(r"gs://bucket/a needs another package: python -m pip install 'jaxgpt\[remote\]'", load, "gs://bucket/a")
    monkeypatch.setattr(multihost, "is_multiprocess", lambda: True)
    monkeypatch.setattr(multihost, "raise_on_all", contextlib.nullcontext)
    refused("several processes need a --run-dir that all of them see", fit, experiment, ADDRESS)
    assert [address_of(x) for x in ("runs/a", Path("/a/b"), None, "C:/x", "a:b")] == [None] * 5


def serve_s3():
    moto = pytest.importorskip("moto.server", reason="moto[server] is not installed: a local S3")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    fs = s3fs.S3FileSystem(endpoint_url=url, key="a", secret="b", skip_instance_cache=True)
    fs.mkdir("bucket")
    return server.stop, fs


def serve_gcs():
    gcsfs = pytest.importorskip("gcsfs.core", reason="gcsfs is not installed")
    server = GcsServer()
    return server.stop, gcsfs.GCSFileSystem(endpoint_url=server.url, token="anon", skip_instance_cache=True)


@pytest.mark.slow
@pytest.mark.numbers
@pytest.mark.parametrize("protocol, serve", [("s3", serve_s3), ("gs", serve_gcs)])
def test_servers_of_both_kinds(machine, text_file, tiny_run, protocol, serve, request):
    (stop, fs), address = serve(), f"{protocol}://bucket/runs/a"
    request.addfinalizer(stop)
    machine(fs)
    fit(tiny_experiment(text_file), address, progress=False)
    machine(fs)
    check_equal(load(address), tiny_run)
    assert [row["status"] for row in runs(f"{protocol}://bucket").to_json()] == ["complete"]
    machine(fs)
    fit(tiny_experiment(text_file, steps=8), address, progress=False, extend=True)
    assert not [name for name in fs.find("bucket/runs/a") if "checkpoints/2/" in name or name.endswith(".lease")]
    first, second = Bucket(address), Bucket(address)
    first._write_lease("create")
    with pytest.raises(FileExistsError):
        second._write_lease("create")
    second._take_lease()  # it is not renewed
    with pytest.raises(CheckpointSaveError, match="is being trained by another process now"):
        first.synchronise()
