import contextlib
import dataclasses

import pytest
from starlette.testclient import TestClient

from jaxgpt.config import DataConfig
from jaxgpt.data.dataset import prepare
from jaxgpt.serve.app import make_app
from jaxgpt.serve.requests import Served
from jaxgpt.serve.scheduler import Scheduler
from jaxgpt.serve.server import Guard, make_server
from tests.helpers import make_model, recorded_run
from tests.serve.fake_engine import FakeEngine, fake_score

BLOCK = 96


@pytest.fixture(scope="session")
def byte_run(tmp_path_factory, text_file):
    """A run with random parameters that reads and writes bytes, so that characters are split."""
    config = DataConfig(path=str(text_file), tokenizer="byte")
    directory = tmp_path_factory.mktemp("serve") / "tiny"
    run = recorded_run(directory, config, prepare(config, block_size=BLOCK), block_size=BLOCK)
    return dataclasses.replace(run, params=make_model(run.model.config)[1]).for_decoding()


class Client(TestClient):
    """A client with the name that the server answers to."""

    def __init__(self, app, **options):
        super().__init__(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False, **options)

    def ask(self, path="/v1/completions", **body):
        return self.post(path, json=body)


@pytest.fixture
def faked(byte_run):
    """A function that starts a server over a fake engine: faked(engine, key=...) -> client, whose `engine` it is."""
    with contextlib.ExitStack() as stack:

        def start(engine=None, *, key=None, queue=4, hosts=(), **limits):
            engine = engine or FakeEngine()
            scheduler = Scheduler(engine, fake_score, queue=queue, log=lambda line: None)
            served, lines = Served(byte_run, slots=engine.slots, queue=queue), []
            app = make_app(served, scheduler, lines.append)
            app = Guard(app, scheduler.metrics, key=key, hosts=hosts, **limits)
            client = stack.enter_context(Client(app))
            client.guard, client.engine, client.scheduler, client.lines = app, engine, scheduler, lines
            return client

        yield start


@pytest.fixture(scope="session")
def real(byte_run):
    """A client of a server with an engine."""
    with Client(start_server(byte_run)) as client:
        yield client


def start_server(run):
    """The application over the engine of a run."""
    return make_server(run, slots=4, say=lambda line: None, prefix_bytes=10**7, timeout=60.0)
