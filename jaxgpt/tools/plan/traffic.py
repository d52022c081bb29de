"""Count the bytes that instructions read from and write to main memory."""

import math
import re

from jaxgpt.tools.plan.hlo import (
    COLLECTIVES,
    VIEWS,
    Computation,
    Instruction,
    Module,
    find_parameter,
    find_root,
)

FREE = {  # no traffic of their own; what they call is counted separately
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier"),
    *("partition-id", "replica-id", "while", "conditional", "call", "async-start"),
}
# Custom calls that compute nothing.
BOOKKEEPING = {"AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone"}
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand that is written


def count_traffic(module: Module, computation: Computation, x: Instruction) -> float:
    """Return the bytes of main memory that one instruction outside fusions reads and writes."""
    if x.op in FREE or x.op.endswith(("-done", "-update")) or any(f'"{name}"' in x.text for name in BOOKKEEPING):
        return 0.0
    if x.op in ("slice-start", "dynamic-slice-start"):
        # A TPU prefetches a slice of an array; the first result is the array itself.
        source, part = x.arrays[:2]
        return sum(part.bytes for a in (source, part) if not a.on_chip)
    read = sum(_bytes_read(module, computation, x, i) for i in range(len(x.operands)))
    if x.op == "fusion":
        outputs = _bytes_written(module, module.called(x), find_root(module.called(x)))
        if "kind=kCustom" in x.text:  # buffers of an asynchronous collective, passed through
            for index in re.findall(r"\{(\d*)\}: \(\d+, ", x.attribute(r"output_to_operand_aliasing=\{(.*?)\}, [a-z]")):
                outputs[int(index or 0)] = 0
    elif x.op in IN_PLACE:
        outputs = [sum(a.bytes for a in computation[x.operands[IN_PLACE[x.op]]].arrays)]
    else:
        outputs = [a.bytes for a in x.arrays]
    written = sum(size for size, a in zip(outputs, x.arrays, strict=False) if not a.on_chip)
    if x.op == "custom-call":  # a Pallas kernel may read an operand several times, and states how often
        stated = x.attribute(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"')
        return max(read + written, float(stated or 0))
    # Every start except that of an all-reduce returns its operands with its results.
    returns_operands = x.op == "send" or (x.is_start and x.op != "all-reduce-start")
    return max(written, read) if returns_operands else read + written


def _bytes_read(module: Module, computation: Computation, x: Instruction, i: int) -> float:
    """Return the bytes of main memory that an instruction reads from its operand i."""
    arrays = [a for a in computation[x.operands[i]].arrays if not a.on_chip]
    whole, elements = sum(a.bytes for a in arrays), None
    if x.op == "fusion" and len(arrays) == 1:
        fused = module.called(x)
        elements = _elements_read(module, fused, find_parameter(fused, i))
    elif i == 0 and arrays:
        elements = _slice_read(x)
    return whole if elements is None else min(whole, arrays[0].bits / 8 * elements)


def _slice_read(x: Instruction) -> int | None:
    """Return the number of elements of its first operand that an instruction reads. None means all."""
    if x.op in ("dynamic-slice", "slice", "gather"):
        return math.prod(x.arrays[0].dims)
    return 0 if x.op in IN_PLACE else None


def _elements_read(module: Module, fused: Computation, x: Instruction) -> int:
    """Return the number of elements of x, a parameter or a view of one, that a fusion reads."""
    whole = math.prod(x.arrays[0].dims)
    total = whole if x.is_root else 0
    uses = [(user, i) for user in fused.values() for i, name in enumerate(user.operands) if name == x.name]
    for user, i in uses:
        if user.op in VIEWS:
            total += _elements_read(module, fused, user)
        elif user.op == "fusion":
            inner = module.called(user)
            total += _elements_read(module, inner, find_parameter(inner, i))
        elif user.op == "tuple" or "AsyncCollectiveDone" in user.text:
            pass  # passed through
        elif user.op in COLLECTIVES and find_root(fused).op == "tuple" and "all-reduce-scatter" not in user.text:
            pass  # the middle of an asynchronous collective; its start has read x
        else:
            part = _slice_read(user) if i == 0 else None
            total += whole if part is None else part
    return total


def _bytes_written(module: Module, fused: Computation, x: Instruction) -> list[int]:
    """Return the bytes that a fusion with root x writes to each array of x; in place, only those of the update."""
    if x.op == "tuple":
        return [n for name in x.operands for n in _bytes_written(module, fused, fused[name])]
    if x.op in ("bitcast", "reshape"):
        return _bytes_written(module, fused, fused[x.operands[0]])
    if x.op == "fusion":
        return _bytes_written(module, module.called(x), find_root(module.called(x)))
    if x.op == "parameter":
        return [0 for _ in x.arrays]
    return [a.bytes for a in (fused[x.operands[IN_PLACE[x.op]]] if x.op in IN_PLACE else x).arrays]
