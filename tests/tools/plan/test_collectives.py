"""Which collectives a compiled program has, and how long they take at least."""

import types

import pytest

from jaxgpt.parallel.limits import PEAKS
from jaxgpt.tools.plan.collectives import Collective, collective_seconds, find_bandwidth, read_collectives


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
        ("TPU v5 lite", (4, 4), (0, 1, 2, 3), 2),  # a row
        ("TPU v6 lite", (4, 4), range(16), 4),
        ("TPU v5", (4, 4, 4), range(64), 6),
    ],
)
def test_links_add_up(kind, shape, group, links):
    assert find_bandwidth(devices(kind, *shape), tuple(group)) == links * PEAKS[kind].link_bandwidth


def test_nvlink_ends_at_the_host():
    h200 = devices("NVIDIA H200", 8) + devices("NVIDIA H200", 8, process_index=1)
    assert find_bandwidth(h200, range(8)) == 450e9
    assert find_bandwidth(h200, range(16)) == 8 * 50e9  # eight network cards, which are slower than NVLink
    assert find_bandwidth(h200, (0, 8)) == 50e9  # one: the other seven carry the other groups
    assert find_bandwidth(h200, (0, 1, 2, 8)) == 50e9  # the host with the fewest
    assert find_bandwidth(devices("TPU v4", 2, 2, 1), (0,)) is find_bandwidth(devices("NVIDIA H20", 2), (0, 1)) is None
    nvl = devices("NVIDIA H200 NVL", 8) + devices("NVIDIA H200 NVL", 8, process_index=1)
    assert find_bandwidth(nvl, range(8)) == 64e9
    assert find_bandwidth(nvl, range(16)) is None  # nothing is known of the network between such hosts


def test_the_network_between_slices_is_the_hosts():
    """Each chip has a share of its host's cards, whatever part of the slice is in the group. For v4 it is not known."""
    v5e, v4 = (
        [d for index in (0, 1) for d in devices(kind, 4, 4, slice_index=index)] for kind in ("TPU v5e", "TPU v4")
    )
    assert find_bandwidth(v5e, (0, 16)) == find_bandwidth(v5e, range(32)) == 2 * 100e9 / 8 / 8
    assert find_bandwidth(v5e, range(16, 32)) == 4 * PEAKS["TPU v5e"].link_bandwidth
    assert find_bandwidth(v4, (0, 16)) is None


def test_seconds():
    gather = collective_seconds("all-gather", 8_000_000, 4, 1e9)
    assert gather == pytest.approx(6e-3)
    assert collective_seconds("reduce-scatter", 8_000_000, 4, 1e9) == gather
    assert collective_seconds("all-reduce", 8_000_000, 4, 1e9) == 2 * gather
    assert collective_seconds("all-to-all", 8_000_000, 16, 1e9) == pytest.approx(7.5e-3)
    assert collective_seconds("collective-permute", 8_000_000, 4, 1e9) == pytest.approx(8e-3)


TPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%start (param_0.70: bf16[1,512,256]) -> (bf16[1,512,256], bf16[1,512,512], s32[2]) {
  %param_0.70 = bf16[1,512,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.27 = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.70), channel_id=14, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={2}
  ROOT %custom-call.4 = (bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[1,512,512]{2,1,0:T(8,128)(2,1)}, s32[2]{0:S(4)}) custom-call(%all-gather.27), custom_call_target="AsyncCollectiveStart"
}

%done (param_0.95: bf16[1,512,256], param_1.86: bf16[1,512,512]) -> bf16[1,512,512] {
  %param_0.95 = bf16[1,512,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.31 = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.95), channel_id=14, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={2}
  ROOT %custom-call.6 = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} custom-call(%param_0.95, %all-gather.31), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.2.clone.1 (input_0.2: bf16[512,512]) -> bf16[256,512] {
  %input_0.2 = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-reduce.13 = bf16[512,512]{1,0:T(8,128)(2,1)} all-reduce(%input_0.2), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  ROOT %dynamic-slice.69 = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%all-reduce.13), dynamic_slice_sizes={256,512}
}

%body (wide.param.4: (s32[], bf16[1,512,256], bf16[512,512])) -> (s32[], bf16[1,512,256], bf16[512,512]) {
  %wide.param.4 = (s32[]{:T(128)}, /*index=1*/bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %async-collective-start = (bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[1,512,512]{2,1,0:T(8,128)(2,1)}, s32[2]{0:S(4)}) fusion(%wide.param.4), kind=kCustom, calls=%start
  %async-collective-done = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} fusion(%async-collective-start), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%done
  ROOT %fusion.61 = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} fusion(%wide.param.4), kind=kCustom, calls=%all-reduce-scatter.2.clone.1
}

%condition (wide.param.1: (s32[], bf16[1,512,256], bf16[512,512])) -> pred[] {
  %wide.param.1 = (s32[]{:T(128)}, bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %constant.63 = s32[]{:T(128)} constant(5)
  %get-tuple-element.275 = s32[]{:T(128)} get-tuple-element(%wide.param.1), index=0
  ROOT %lt.10 = pred[]{:T(512)} compare(%get-tuple-element.275, %constant.63), direction=LT
}

ENTRY %main.1 (w.1: bf16[1,512,256], x.1: bf16[512,512]) -> s32[] {
  %w.1 = bf16[1,512,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %constant.1 = s32[]{:T(128)} constant(1)
  %copy.1 = s32[]{:T(128)} copy(%constant.1)
  %tuple.54 = (s32[]{:T(128)}, bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) tuple(%copy.1, %w.1, %w.1)
  ROOT %while.32 = (s32[]{:T(128)}, bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) while(%tuple.54), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(("loop", "times"), [("", 4), (', backend_config={"known_trip_count":{"n":"12"}}', 12)])
def test_a_loop_counts_as_often_as_it_runs(loop, times):
    """Its first iteration is peeled off. The halves of a collective in two fusions are one."""
    found = read_collectives(TPU.replace("body=%body", f"body=%body{loop}"))
    assert sorted(found, key=lambda c: c.kind) == [
        Collective(kind=kind, bytes=2**19, group=(0, 4), times=times) for kind in ("all-gather", "reduce-scatter")
    ]


def one(line: str, module: str = "num_partitions=8") -> list[tuple]:
    """What the reader makes of one instruction whose operand is %x."""
    text = f"HloModule jit_f, {module}\n\nENTRY %main (x: f32[6,4]) -> f32[] {{\n  %x = f32[6,4]{{1,0}} parameter(0)\n  {line}\n}}\n"
    return [(c.kind, c.bytes, c.group, c.between_slices) for c in read_collectives(text)]


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", (0, 1)),
        ("[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("[2,4]<=[2,2,2]T(1,0,2)", (0, 1, 4, 5)),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=4], device_ids=([4,4]T(1,0)) {'axis_2'}", (0, 4, 8, 12)),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", (0, 1, 4, 5)),
        ("{}", tuple(range(8))),
    ],
)
def test_replica_groups(groups, first):
    line = f"ROOT %all-reduce.19 = f32[6,4]{{1,0}} all-reduce(%x), channel_id=3, replica_groups={groups}, to_apply=%add"
    assert one(line) == [("all-reduce", 96, first, False)]
    if groups == "{}":
        assert one(line, module="replica_count=4") == [("all-reduce", 96, (0, 1, 2, 3), False)]


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("(f32[6,4]{1,0}, f32[48,4]{1,0}) all-gather-start(%x), dimensions={0}", 8 * 96),
        ("f32[6,4]{1,0} reduce-scatter(%x), dimensions={0}", 8 * 96),
        ("(f32[6,4]{1,0}, f32[6,4]{1,0}, u32[], u32[]) collective-permute-start(%x)", 96),
        ("(f32[6,4]{1,0}, bf16[4]{0}) all-reduce-start(%x, %x), to_apply=%add", 96 + 8),
    ],
)
def test_the_full_buffers_count(line, size):
    [(_, found, *_)] = one(f"%y = {line}, channel_id=1, replica_groups={{}}")
    assert found == size


SEND = (
    "(f32[6,4]{1,0:T(8,128)}, u32[], token[]) send(%x, %after-all), channel_id=2, is_host_transfer=true, "
    'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="psum.7_0",'
    '_xla_megascale_target=TARGET,_xla_megascale_transfer_type="KIND"}'
)


@pytest.mark.parametrize(
    ("kind", "target", "expected"),
    [
        ("ALL_GATHER", '"{1,2,3,4}x{0:7}"', ("all-gather", 4 * 96, (0, 8, 16, 24))),
        ("ALL_TO_ALL", "{{200000,400000},{200001,400001}}", ("all-to-all", 96, (8, 24))),
        ("ONE_TO_ONE", "{{100000->200000},{200000->100000}}", ("collective-permute", 96, (0, 8))),
    ],
)
def test_transfers_between_slices(kind, target, expected):
    """The texts are those of libtpu 0.0.42; a slice has 8 devices. What is received is not counted again."""
    send = SEND.replace("TARGET", target).replace("KIND", kind)
    assert one(f"%send = {send}\n  %recv = {send.replace('send(', 'recv(')}") == [(*expected, True)]
