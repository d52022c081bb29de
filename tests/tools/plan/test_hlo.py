"""Counting in the text of compiled programs: against XLA's count, against arithmetic, and on texts of its own."""

import jax
import jax.numpy as jnp
import pytest

from jaxgpt.tools.plan.hlo import Collective, read_program
from tests.helpers import script

read_traffic = script("benchmarks/traffic").read_traffic


def compiled(f, *shapes):
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()


def convolve(x, w):
    return jax.lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))


@pytest.mark.parametrize(
    ("f", "shapes", "flops"),
    [
        (lambda a, b: a @ b, [(24, 56), (56, 40)], 2 * 24 * 56 * 40),
        (convolve, [(2, 10, 3), (4, 3, 5)], 2 * 2 * 7 * 4 * 3 * 5),
        (
            lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jax.lax.fori_loop(2, 7, lambda _, x: x @ x, x), x),
            [(32, 32)],
            3 * 5 * 2 * 32**3,
        ),
    ],
    ids=["product", "convolution", "nested loops"],
)
def test_flops(f, shapes, flops):
    assert read_program(compiled(f, *shapes).as_text()).flops == flops


def test_a_scan_counts_as_often_as_it_runs():
    def f(x_BD, w_LDD):
        return jax.lax.scan(lambda x_BD, w_DD: (jnp.tanh(x_BD @ w_DD), None), x_BD, w_LDD)[0]

    L, B, D = 7, 16, 64
    step = 2 * B * D * D
    assert read_program(compiled(f, (B, D), (L, D, D)).as_text()).flops == L * step
    gradient = compiled(jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1)), (B, D), (L, D, D))
    assert read_program(gradient.as_text()).flops == 3 * L * step


def test_a_scan_reads_each_layer_once():
    def f(x_BD, w_LDD):
        return jax.lax.scan(lambda x_BD, w_DD: (x_BD @ w_DD, None), x_BD, w_LDD)[0]

    L, B, D = 9, 1, 256
    layers = 4 * L * D * D
    accessed = read_traffic(compiled(f, (B, D), (L, D, D)).as_text()).bytes_accessed
    # At least once; at most, a slice copied out and read again. The whole stack in every iteration would be 9 times.
    assert layers <= accessed <= 3.1 * layers


TPU = """HloModule jit_step, is_scheduled=true, entry_computation_layout={()->()}, num_partitions=8

%start (param_0.70: bf16[1,512,256]) -> (bf16[1,512,256], bf16[1,512,512], s32[2]) {
  %param_0.70 = bf16[1,512,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.27 = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.70), channel_id=14, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={2}
  ROOT %custom-call.4 = (bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[1,512,512]{2,1,0:T(8,128)(2,1)}, s32[2]{0:S(4)}) custom-call(%all-gather.27), custom_call_target="AsyncCollectiveStart"
}

%done (param_0.95: bf16[1,512,256], param_1.86: bf16[1,512,512]) -> bf16[1,512,512] {
  %param_0.95 = bf16[1,512,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1.86 = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} parameter(1)
  %all-gather.31 = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.95), channel_id=14, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={2}
  ROOT %custom-call.6 = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} custom-call(%param_0.95, %param_1.86, %all-gather.31), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.2.clone.1 (input_0.2: bf16[512,512]) -> bf16[256,512] {
  %input_0.2 = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-reduce.13 = bf16[512,512]{1,0:T(8,128)(2,1)} all-reduce(%input_0.2), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  %c = u32[] constant(0)
  ROOT %dynamic-slice.69 = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%all-reduce.13, %c, %c), dynamic_slice_sizes={256,512}
}

%body (wide.param.4: (s32[], bf16[1,512,256], bf16[512,512])) -> (s32[], bf16[1,512,256], bf16[512,512]) {
  %wide.param.4 = (s32[]{:T(128)}, /*index=1*/bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%wide.param.4), index=0
  %w = bf16[1,512,256]{2,1,0:T(8,128)(2,1)} get-tuple-element(%wide.param.4), index=1
  %x = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.4), index=2
  %async-collective-start = (bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[1,512,512]{2,1,0:T(8,128)(2,1)}, s32[2]{0:S(4)}) fusion(%w), kind=kCustom, calls=%start
  %in = bf16[1,512,256]{2,1,0:T(8,128)(2,1)} get-tuple-element(%async-collective-start), index=0
  %out = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} get-tuple-element(%async-collective-start), index=1
  %async-collective-done = bf16[1,512,512]{2,1,0:T(8,128)(2,1)} fusion(%in, %out), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%done
  %fusion.61 = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.2.clone.1
  %custom.1 = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, backend_config={"custom_call_config":{"body":"TUz","cost_estimate":{"flops":"1000","transcendentals":"0"}}}
  ROOT %tuple.9 = (s32[]{:T(128)}, bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) tuple(%i, %w, %x)
}

%condition (wide.param.1: (s32[], bf16[1,512,256], bf16[512,512])) -> pred[] {
  %wide.param.1 = (s32[]{:T(128)}, bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %constant.63 = s32[]{:T(128)} constant(4)
  %get-tuple-element.275 = s32[]{:T(128)} get-tuple-element(%wide.param.1), index=0
  ROOT %lt.10 = pred[]{:T(512)} compare(%get-tuple-element.275, %constant.63), direction=LT
}

ENTRY %main.1 (w.1: bf16[1,512,256], x.1: bf16[512,512]) -> s32[] {
  %w.1 = bf16[1,512,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %x.1 = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(1)
  %constant.1 = s32[]{:T(128)} constant(0)
  %copy-start = (bf16[512,512]{1,0:T(8,128)(2,1)S(1)}, bf16[512,512]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x.1)
  %copy-done = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %tuple.54 = (s32[]{:T(128)}, bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) tuple(%constant.1, %w.1, %copy-done)
  %while.32 = (s32[]{:T(128)}, bf16[1,512,256]{2,1,0:T(8,128)(2,1)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}) while(%tuple.54), condition=%condition, body=%body
  ROOT %r = s32[]{:T(128)} get-tuple-element(%while.32), index=0
}
"""


def test_a_tpus_text():
    program = read_program(TPU)
    assert program.collectives == tuple(
        Collective(kind=kind, bytes=2**19, group=(0, 4), times=4) for kind in ("all-gather", "reduce-scatter")
    )
    assert program.custom_flops == 4 * 1000 and program.silent_kernels == 0
    assert read_traffic(TPU).kernels == {"Pallas": 4}
    assert read_program(TPU.replace('"cost_estimate"', '"bytes"')).silent_kernels == 4


def one(line: str, module: str = "num_partitions=8") -> list[tuple]:
    """What the reader makes of one instruction whose operand is %x."""
    text = f"HloModule jit_f, {module}\n\nENTRY %main (x: f32[6,4]) -> f32[] {{\n  %x = f32[6,4]{{1,0}} parameter(0)\n  {line}\n}}\n"
    return [(c.kind, c.bytes, c.group) for c in read_program(text).collectives]


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
    assert one(line) == [("all-reduce", 96, first)]
    if groups == "{}":
        assert one(line, module="replica_count=4") == [("all-reduce", 96, (0, 1, 2, 3))]


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
    """The texts are those of libtpu 0.0.42; a slice has 8 devices. What is sent is read once, and received once."""
    send = SEND.replace("TARGET", target).replace("KIND", kind)
    text = f"""HloModule jit_f, num_partitions=8

ENTRY %main (x: f32[6,4]) -> f32[6,4] {{
  %x = f32[6,4]{{1,0:T(8,128)}} parameter(0)
  %after-all = token[] after-all()
  %recv = {send.replace("send(%x, ", "recv(")}
  %send = {send}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %y = f32[6,4]{{1,0:T(8,128)}} negate(%x)
  %recv-done = (f32[6,4]{{1,0:T(8,128)}}, token[]) recv-done(%recv), channel_id=2, is_host_transfer=true
  ROOT %r = f32[6,4]{{1,0:T(8,128)}} get-tuple-element(%recv-done), index=0
}}
"""
    program = read_program(text)
    [c] = program.collectives
    assert (c.kind, c.bytes, c.group) == expected and c.between_slices and c.times == 1
    assert read_traffic(text).bytes_accessed == pytest.approx(4 * 96, abs=8)


GPU = """HloModule jit_step, is_scheduled=true, entry_computation_layout={()->()}, num_partitions=8

%block (p0: bf16[64,512], p1: bf16[512,256]) -> f32[4,64,256] {
  %p0 = bf16[64,512]{1,0} parameter(0)
  %b0 = bf16[4,64,128]{2,0,1} bitcast(%p0)
  %p1 = bf16[512,256]{1,0} parameter(1)
  %b1 = bf16[4,128,256]{2,1,0} bitcast(%p1)
  ROOT %dot.1 = f32[4,64,256]{2,1,0} dot(%b0, %b1), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}

%sum (p2: f32[4,64,256]) -> bf16[64,256] {
  %p2 = f32[4,64,256]{2,1,0} parameter(0)
  %r = f32[64,256]{1,0} reduce(%p2), dimensions={0}, to_apply=%add
  ROOT %c = bf16[64,256]{1,0} convert(%r)
}

%count (p3: s32[]) -> s32[] {
  %p3 = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %a = s32[] add(%p3, %one)
}

%body (state: (s32[], bf16[64,512], bf16[64,256])) -> (s32[], bf16[64,512], bf16[64,256]) {
  %state = (s32[], bf16[64,512]{1,0}, bf16[64,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[64,512]{1,0} get-tuple-element(%state), index=1
  %w = bf16[64,256]{1,0} get-tuple-element(%state), index=2
  %all-gather-start.1 = (bf16[64,256]{1,0}, bf16[512,256]{1,0}) all-gather-start(%w), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, backend_config={"collective_backend_config":{"is_sync":true}}
  %all-gather-done.1 = bf16[512,256]{1,0} all-gather-done(%all-gather-start.1)
  %all-gather-start.2 = (bf16[64,256]{1,0}, bf16[512,256]{1,0}) all-gather-start(%w), channel_id=2, replica_groups=[1,8]<=[8], dimensions={0}, backend_config={"collective_backend_config":{"is_sync":false}}
  %gemm = f32[4,64,256]{2,1,0} fusion(%x, %all-gather-done.1), kind=kCustom, calls=%block, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %reduced = bf16[64,256]{1,0} fusion(%gemm), kind=kInput, calls=%sum, backend_config={"fusion_backend_config":{"kind":"__triton"}}
  %all-gather-done.2 = bf16[512,256]{1,0} all-gather-done(%all-gather-start.2)
  %all-reduce-start = bf16[512,256]{1,0} all-reduce-start(%all-gather-done.2), channel_id=3, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":false}}
  %next = s32[] fusion(%i), kind=kLoop, calls=%count
  %all-reduce-done = bf16[512,256]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %t = (s32[], bf16[64,512]{1,0}, bf16[64,256]{1,0}) tuple(%next, %x, %reduced)
}

%condition (state.1: (s32[], bf16[64,512], bf16[64,256])) -> pred[] {
  %state.1 = (s32[], bf16[64,512]{1,0}, bf16[64,256]{1,0}) parameter(0)
  ROOT %p = pred[] constant(true)
}

ENTRY %main (a: s32[], b: bf16[64,512], c: bf16[64,256]) -> s32[] {
  %a = s32[] parameter(0)
  %b = bf16[64,512]{1,0} parameter(1)
  %c = bf16[64,256]{1,0} parameter(2)
  %t0 = (s32[], bf16[64,512]{1,0}, bf16[64,256]{1,0}) tuple(%a, %b, %c)
  %while = (s32[], bf16[64,512]{1,0}, bf16[64,256]{1,0}) while(%t0), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  ROOT %out = s32[] get-tuple-element(%while), index=0
}
"""


def test_a_gpus_text():
    """Count a loop's split products and kernels."""
    program = read_program(GPU)
    product, partial = 2 * 64 * 512 * 256, 4 * 4 * 64 * 256
    assert program.flops == 12 * product  # in four parts, whose sums another kernel adds
    assert read_traffic(GPU).kernels == {"Triton product": 12, "Triton fusion": 12}
    assert [(c.kind, c.bytes, len(c.group), c.times) for c in program.collectives] == [
        ("all-gather", 2 * 512 * 256, 8, 12),
        ("all-gather", 2 * 512 * 256, 8, 12),
        ("all-reduce", 2 * 512 * 256, 2, 12),
    ]
    read, sums = 2 * 64 * 512 + 2 * 512 * 256, 2 * partial + 2 * 64 * 256  # of the product, and of the other kernel
    gathers = 2 * (2 * 64 * 256 + 2 * 512 * 256)
    assert read_traffic(GPU).bytes_accessed == 12 * (read + sums + 8 + gathers + 2 * 2 * 512 * 256)


FMHA = """ROOT %attend = (bf16[2,12,1024,64]{3,1,2,0}, f32[2,12,1024]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"algorithm": {"tuning_knobs": {"17": "1"}}, "intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "12", "1024", "1024"], "tuple_shapes": []}, "mask_type": "CAUSAL", "sliding_window_length": 0}}"""


@pytest.mark.parametrize(
    ("old", "new", "products", "pairs"),
    [
        ("", "", 2, 1024 * 1025 / 2),
        ("fmhaSoftmax", "fmhaSoftmaxBackward", 5, 1024 * 1025 / 2),
        ('length": 0', 'length": 256', 2, 256 * 257 / 2 + 768 * 256),
        ('"CAUSAL"', '"NO_MASK"', 2, 1024 * 1024),
    ],
)
def test_cudnns_attention_states_its_shape(old, new, products, pairs):
    call = FMHA.replace(old, new) if old else FMHA
    text = f"HloModule jit_f\n\nENTRY %main (q: bf16[2,1024,12,64]) -> f32[] {{\n  %q = bf16[2,1024,12,64]{{3,2,1,0}} parameter(0)\n  {call}\n}}\n"
    program = read_program(text)
    assert program.flops == products * 2 * 2 * 12 * 64 * pairs
    backward = "Backward" in new
    traffic = read_traffic(text)
    assert traffic.kernels == {f"cuDNN attention {'backward' if backward else 'forward'}": 1}
    q = 2 * 2 * 1024 * 12 * 64
    assert traffic.bytes_accessed == 4 * q + 4 * 2 * 12 * 1024


def test_kernels_take_the_longer_of_their_two_times():
    """In turn they take at least the longer sum, and at most both."""
    text = compiled(lambda a, b: jax.nn.gelu(a @ b).sum(), (256, 512), (512, 128)).as_text()
    traffic, flops = read_traffic(text), read_program(text).flops
    assert flops == 2 * 256 * 512 * 128
    by_memory, by_products = traffic.serial_seconds(1e30, 1e9), traffic.serial_seconds(1e9, 1e30)
    assert (by_memory, by_products) == pytest.approx((traffic.bytes_accessed / 1e9, flops / 1e9))
    assert max(by_memory, by_products) <= traffic.serial_seconds(1e9, 1e9) <= by_memory + by_products
