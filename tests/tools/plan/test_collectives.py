"""Which collectives a compiled program has, and how many bytes they exchange."""

import pytest

from jaxgpt.tools.plan.collectives import Collective, read_collectives

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
    kinds = ("all-gather", "reduce-scatter")
    assert found == tuple(Collective(False, kind, 2, times, times * 2**19) for kind in kinds)


X = "  %x = f32[6,4]{1,0} parameter(0)\n  %after-all = token[] after-all()\n"


def one(line: str, module: str = "num_partitions=8") -> list[tuple]:
    """What the reader makes of one instruction whose operand is %x."""
    text = f"HloModule jit_f, {module}\n\nENTRY %main (x: f32[6,4]) -> f32[] {{\n{X}  {line}\n}}\n"
    return [(c.kind, c.bytes, c.devices, c.between_slices) for c in read_collectives(text)]


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", 2),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("[2,4]<=[2,2,2]T(1,0,2)", 4),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=4], device_ids=([4,4]T(1,0)) {'axis_2'}", 4),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", 4),
        ("{}", 8),
    ],
)
def test_replica_groups(groups, devices):
    line = f"ROOT %all-reduce.19 = f32[6,4]{{1,0}} all-reduce(%x), channel_id=3, replica_groups={groups}, to_apply=%add"
    assert one(line) == [("all-reduce", 96, devices, False)]
    if groups == "{}":
        assert one(line, module="replica_count=4") == [("all-reduce", 96, 4, False)]


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("(f32[6,4]{1,0}, f32[48,4]{1,0}) all-gather-start(%x), dimensions={0}", 8 * 96),
        ("f32[6,1]{1,0} reduce-scatter(%x), dimensions={1}", 96),
        ("(f32[6,4]{1,0}, f32[6,4]{1,0}, u32[], u32[]) collective-permute-start(%x)", 96),
        ("(f32[6,4]{1,0}, f32[6,4]{1,0}) all-reduce-start(%x, %x), to_apply=%add", 2 * 96),
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
        ("ALL_GATHER", '"{1,2,3,4}x{0:7}"', ("all-gather", 4 * 96, 4)),
        ("ALL_TO_ALL", "{{200000,400000},{200001,400001}}", ("all-to-all", 96, 2)),
        ("ONE_TO_ONE", "{{100000->200000},{200000->100000}}", ("collective-permute", 96, 2)),
    ],
)
def test_transfers_between_slices(kind, target, expected):
    """The texts are those of libtpu 0.0.42. What is received is not counted again."""
    send = SEND.replace("TARGET", target).replace("KIND", kind)
    assert one(f"%send = {send}\n  %recv = {send.replace('send(', 'recv(')}") == [(*expected, True)]
