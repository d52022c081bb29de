"""How long communication takes at least."""

import types

import pytest

from jaxgpt.parallel.limits import PEAKS
from jaxgpt.tools.plan.plan import collective_seconds, ring_bandwidth


def devices(kind: str, *shape: int, process_index: int = 0, slice_index: int = 0):
    """A whole slice, the first coordinate running fastest, as libtpu counts."""
    x, y, z = (*shape, 1, 1, 1)[:3]
    return [
        types.SimpleNamespace(device_kind=kind, coords=[i, j, k], process_index=process_index, slice_index=slice_index)
        for k in range(z)
        for j in range(y)
        for i in range(x)
    ]


@pytest.mark.parametrize(
    ("kind", "shape", "group", "links"),
    [
        ("TPU v5 lite", (4, 4), (0, 1, 2, 3), 1),  # a row: a line of links
        ("TPU v5 lite", (4, 4), range(16), 2),  # both
        ("TPU v6 lite", (8, 16), range(128), 3),
        ("TPU v4", (2, 2, 4), range(16), 3),  # within a cube nothing closes
        ("TPU v5", (4, 4, 4), range(64), 6),
    ],
)
def test_links_add_up(kind, shape, group, links):
    assert ring_bandwidth(devices(kind, *shape), tuple(group)) == links * PEAKS[kind].link_bandwidth


def test_nvlink_ends_at_the_host():
    h200 = devices("NVIDIA H200", 8) + devices("NVIDIA H200", 8, process_index=1)
    assert ring_bandwidth(h200, range(8)) == 450e9
    assert ring_bandwidth(h200, range(16)) == 8 * 50e9  # eight network cards, which are slower than NVLink
    assert ring_bandwidth(h200, (0, 8)) == 50e9  # one: the other seven carry the other groups
    assert ring_bandwidth(h200, (0, 1, 2, 8)) == 50e9  # the host with the fewest
    assert ring_bandwidth(devices("TPU v4", 2, 2, 1), (0,)) is ring_bandwidth(devices("NVIDIA H20", 2), (0, 1)) is None
    nvl = devices("NVIDIA H200 NVL", 8) + devices("NVIDIA H200 NVL", 8, process_index=1)
    assert ring_bandwidth(nvl, range(8)) == 64e9
    assert ring_bandwidth(nvl, range(16)) is None  # nothing is known of the network between such hosts


def test_the_network_between_slices_is_the_hosts():
    """Each chip has a share of its host's cards, whatever part of the slice is in the group. For v4 it is not known."""
    v5e, v4 = (
        [d for index in (0, 1) for d in devices(kind, 4, 4, slice_index=index)] for kind in ("TPU v5e", "TPU v4")
    )
    assert ring_bandwidth(v5e, (0, 16)) == ring_bandwidth(v5e, range(32)) == 2 * 100e9 / 8 / 8
    assert ring_bandwidth(v5e, range(16, 32)) == 2 * PEAKS["TPU v5e"].link_bandwidth
    assert ring_bandwidth(v4, (0, 16)) is None


def test_seconds():
    gather = collective_seconds("all-gather", 8_000_000, 4, 1e9)
    assert gather == pytest.approx(6e-3)
    assert collective_seconds("reduce-scatter", 8_000_000, 4, 1e9) == gather
    assert collective_seconds("all-reduce", 8_000_000, 4, 1e9) == 2 * gather
    assert collective_seconds("all-to-all", 8_000_000, 16, 1e9) == pytest.approx(32e-3)
    assert collective_seconds("all-to-all", 8_000_000, 16, 1e9, switched=True) == pytest.approx(7.5e-3)
    assert collective_seconds("collective-permute", 8_000_000, 4, 1e9) == pytest.approx(8e-3)
