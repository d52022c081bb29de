"""Count the FLOPs of single instructions: matrix products, convolutions and cuDNN's attention."""

import math
import re

import numpy as np

from jaxgpt.tools.plan.hlo import Computation, Instruction


def count_flops(computation: Computation, x: Instruction) -> float:
    """Return the FLOPs of a matrix product or a convolution; other instructions have none that count."""
    contracting = x.attribute(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)")  # of a dot, of a cuBLAS call
    is_cublas = x.op == "custom-call" and contracting and "__cublas" in x.text
    if x.op != "convolution" and x.op != "dot" and not is_cublas:
        return 0.0
    lhs, rhs = (computation[operand].arrays[0].dims for operand in x.operands[:2])
    out = x.arrays[0].dims
    if x.op != "convolution":
        return 2.0 * math.prod(out) * math.prod(lhs[int(i)] for i in re.findall(r"\d+", contracting))
    lhs_labels, rhs_labels, out_labels = re.split("_|->", x.attribute(r"dim_labels=(\S+?)(?:,|$| )"))
    total = 2.0 * out[out_labels.index("b")] * out[out_labels.index("f")] * rhs[rhs_labels.index("i")]
    for d in range(len(lhs) - 2):  # on a TPU also batched products, whose windows mostly read padding or holes
        n, taps, outs = (
            s[labels.index(str(d))] for s, labels in ((lhs, lhs_labels), (rhs, rhs_labels), (out, out_labels))
        )
        stride, dilate, rhs_dilate = (_window(x, name, d, 1) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        at = np.arange(outs)[:, None] * stride + np.arange(taps) * rhs_dilate - _window(x, "pad", d, 0)
        total *= np.count_nonzero((at >= 0) & (at <= (n - 1) * dilate) & (at % dilate == 0))
    return float(total)


def _window(x: Instruction, name: str, dimension: int, default: int) -> int:
    values = x.attribute(rf"window=\{{[^}}]*\b{name}=([\d_x\-]+)")
    return int(values.split("x")[dimension].split("_")[0]) if values else default


def count_attention_flops(x: Instruction) -> float:
    """Return the FLOPs of a call of cuDNN's attention: 2 products forward, 5 backward, which computes the scores again.

    Of a causal mask, only the scores that it lets through count.
    """
    target = x.attribute(r'custom_call_target="([^"]*)"')
    scores = re.search(r'"intermediate_tensor_shape": ?\{[^\[]*"dimensions": ?\[([^\]]*)\]', x.text)
    if not target.startswith("__cudnn$fmha") or not scores:
        return 0.0
    *batch_heads, T, S = (int(n) for n in re.findall(r"\d+", scores[1]))
    seen = T * S
    if "CAUSAL" in x.attribute(r'"mask_type": ?"(\w+)"'):
        window = min(int(x.attribute(r'"sliding_window_length": ?"?(\d+)') or 0) or S, S)
        seen = window * (window + 1) // 2 + (T - window) * window
    products = 5 if target.endswith("Backward") else 2
    return products * 2.0 * math.prod(batch_heads) * seen * x.arrays[0].dims[-1]
