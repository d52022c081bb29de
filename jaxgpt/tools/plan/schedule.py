"""Find what a schedule runs while an asynchronous operation is under way."""

from jaxgpt.tools.plan.hlo import Computation, Instruction, Module

_CARRIERS = {"get-tuple-element", "bitcast", "tuple", "opt-barrier"}  # they pass a pending result on


def instructions_between(module: Module, computation: Computation, start: Instruction) -> list[Instruction] | None:
    """Return the instructions between the start of an operation and its end. None: it is not asynchronous.

    The text of a scheduled program has its instructions in the order in which they are launched. An operation whose end
    is in the next iteration of a loop lasts here until the end of this one.

    Args:
        module: the program.
        computation: where the operation starts.
        start: a "-start", or on a TPU a "send" or a fusion that begins a collective; others are not asynchronous.
    """
    is_start = start.op == "send" or (start.is_start and '"is_sync":true' not in start.text)
    if not is_start and not _calls(module, start, "AsyncCollectiveStart"):
        return None
    pending, between, has_started = {_result(computation, start).name}, [], False
    for x in computation.values():
        if not has_started:
            has_started = x is start
            continue
        uses = not pending.isdisjoint(x.operands)
        if uses and (x.op.endswith("-done") or _calls(module, x, "AsyncCollectiveDone")):
            return between
        if uses:  # also a TPU's fusion of a product with a part of the collective
            pending.add(x.name)
        if not uses or x.op not in _CARRIERS:
            between.append(x)
    return between


def _result(computation: Computation, start: Instruction) -> Instruction:
    """Return what the end of an operation waits for: its start, or the "recv" that answers a "send"."""
    meeting = start.attribute(r'_rendezvous="([^"]*)"') if start.op == "send" else ""
    answers = (x for x in computation.values() if x.op == "recv" and f'_rendezvous="{meeting}"' in x.text)
    return next(answers, start)


def _calls(module: Module, x: Instruction, target: str) -> bool:
    """Return whether an instruction is a fusion with this custom call."""
    if x.op != "fusion":
        return False
    return any(y.op == "custom-call" and f'"{target}"' in y.text for y in module.called(x).values())
