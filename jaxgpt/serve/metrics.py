"""Counters and histograms of the server, as Prometheus reads them. The event loop alone changes them."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """Numbers of observations up to each of some bounds."""

    def __init__(self, bounds: Sequence[float] = SECONDS):
        """Start without observations."""
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def render(self, name: str) -> list[str]:
        """Return the samples."""
        lines, total = [], 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.9g}", f"{name}_count {total}"]


class Metrics:
    """What is counted from one start to the end."""

    def __init__(self) -> None:
        """Start at zero."""
        self.responses: collections.Counter[tuple[str, int]] = collections.Counter()  # by path and status
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.disconnected = 0
        self._first, self._between, self._request = Histogram(), Histogram(), Histogram()

    def tokens_after(self, seconds: float, count: int, *, is_first: bool) -> None:
        """Count tokens of one row that arrived together. seconds: since those before, or since the row was queued."""
        self.completion_tokens += count
        if is_first:
            self._first.observe(seconds)
        else:
            self._between.observe(seconds / count, count)

    def responded(self, path: str, status: int, seconds: float) -> None:
        """Count a response that has ended."""
        self.responses[path, status] += 1
        self._request.observe(seconds)

    def render(self, *, waiting: int, running: int, slots: int, compilations: int) -> str:
        """Return the text of `/metrics`. The arguments are the state of the scheduler now."""
        families: list[tuple[str, str, str, list[str] | Histogram | int]] = [
            (
                "http_requests_total",
                "counter",
                "Requests by path and status.",
                [
                    f'jaxgpt_http_requests_total{{path="{path}",status="{status}"}} {count}'
                    for (path, status), count in sorted(self.responses.items())
                ],
            ),
            ("disconnects_total", "counter", "Clients that left before the end.", self.disconnected),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("cached_tokens_total", "counter", "Tokens of prompts that were not computed again.", self.cached_tokens),
            ("completion_tokens_total", "counter", "Generated tokens.", self.completion_tokens),
            ("waiting", "gauge", "Completions that wait for a slot.", waiting),
            ("slots_used", "gauge", "Slots in use.", running),
            ("slots", "gauge", "Slots.", slots),
            ("compilations_total", "counter", "Programs compiled for requests since the warm-up.", compilations),
            ("first_token_seconds", "histogram", "Time to the first token.", self._first),
            ("between_tokens_seconds", "histogram", "Time between tokens.", self._between),
            ("request_seconds", "histogram", "Time of a whole request.", self._request),
        ]
        lines = []
        for name, kind, text, samples in families:
            lines += [f"# HELP jaxgpt_{name} {text}", f"# TYPE jaxgpt_{name} {kind}"]
            if isinstance(samples, Histogram):
                lines += samples.render(f"jaxgpt_{name}")
            else:
                lines += [f"jaxgpt_{name} {samples}"] if isinstance(samples, int) else samples
        return "\n".join(lines) + "\n"
