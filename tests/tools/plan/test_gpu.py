"""GPUs without a GPU: their names, their facts, and what is said where JAX's CUDA plugin is missing."""

import importlib.metadata
import re
from types import SimpleNamespace

import pytest

from jaxgpt.errors import UserError
from jaxgpt.parallel.limits import PEAKS
from jaxgpt.tools.html_page import read_asset
from jaxgpt.tools.plan.topology import TARGETS, gpu_devices


@pytest.mark.parametrize("name", ["h200", "h200:08", "h200:9", "h200:0x8", "h200:2x2x2"])
def test_what_is_no_topology(name):
    with pytest.raises(UserError, match="such as 8xh200 or h200:8, 4x8xh200"):
        gpu_devices(name)


@pytest.mark.parametrize("name", TARGETS)
def test_targets_agree_with_the_data_sheets(name):
    text = read_asset(f"plan/targets/{name}.txtpb")
    assert text.count("{") == text.count("}") == 3
    values = dict(re.findall(r'(\w+): "?([^"\n]*?)"?(?= \w+:|\n| })', text))
    peaks = PEAKS[values["device_description_str"]]
    assert int(values["device_memory_size"]) == peaks.memory
    assert float(values["memory_bandwidth"]) == pytest.approx(
        peaks.memory_bandwidth, rel=0.13
    )  # the cards of one GPU differ
    # A core's bfloat16 FLOPs per cycle are a power of two; under load, tensor cores clock up to 8% lower than the rest.
    per_cycle = peaks.flops / (int(values["core_count"]) * float(values["clock_rate_ghz"]) * 1e9)
    capability = re.search(r"major: (\d+) minor: (\d+) feature", text).groups()
    flops = {("8", "0"): 2048, ("8", "9"): 512, ("9", "0"): 4096, ("10", "0"): 8192, ("12", "0"): 1024}
    assert flops[capability] == pytest.approx(per_cycle, rel=0.12)


@pytest.mark.parametrize("installed", [[], [SimpleNamespace(version="0.9.1")]])
def test_the_plugin_that_is_not_there(monkeypatch, installed):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda *, name: installed)
    monkeypatch.setattr(importlib.metadata, "version", {"jaxlib": "0.10.2"}.get)
    with pytest.raises(UserError, match="of version 0.10.2, as jaxlib is: pip install"):
        gpu_devices("h200:8")
