"""A row of the table that `gpu.py` prints."""

import dataclasses
import statistics
from collections.abc import Sequence

FAILED = "failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement, with what it is compared to."""

    what: str
    values: Sequence[float] = ()  # of each round; none: it is not available here
    unit: str = ""
    beside: str = ""  # what else there is to know: how it was measured, or why it is not available
    target: str = ""
    ok: bool | None = None  # whether the target is met. None: there is none, or nothing to compare

    def cells(self) -> str:
        """Return the row in Markdown, without the part's name."""
        found = ""
        if self.values:
            found = f"{number(statistics.median(self.values))} {self.unit}".strip()
            if len(self.values) > 1:
                found += f" ({number(min(self.values))} to {number(max(self.values))})"
        verdict = {None: "", True: "yes", False: "NO"}[self.ok]
        return " | ".join(text.replace("|", "/") for text in (self.what, found, self.beside, self.target, verdict))


def number(x: float) -> str:
    """Return a number in a few digits, with commas where it is large."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def unavailable(what: str, why: str) -> Row:
    """Return the row of what cannot be measured on this machine."""
    return Row(what=what, beside=f"not available here: {why}")


def failed(what: str, error: BaseException) -> Row:
    """Return the row of what ended in an error."""
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return Row(what=what, beside=f"{FAILED}: {first[:300]}", ok=False)
