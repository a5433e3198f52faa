"""Two functions, timed in turns, and the table that they are printed in."""

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: medians of both sides, and what the figure of it may be at most.

    The figure is `ours / peer`, or, where `unit` is not "ms" of both sides, what `figure` says.
    """

    name: str
    ours: float
    peer: float
    target: float | None = None
    unit: str = "ms"
    figure: str = "ratio"

    @property
    def value(self) -> float:
        return self.ours / self.peer if self.figure == "ratio" else self.ours

    @property
    def verdict(self) -> str:
        if self.target is None:
            return "-"
        return "pass" if self.value <= self.target else "MISS"

    def cells(self) -> tuple[str, ...]:
        value = f"{self.value:.3f}" if self.figure == "ratio" else f"{self.value:.1f} {self.unit}"
        at_most = "" if self.target is None else f"{self.target:g}"
        sides = (f"{side:,.3f} {self.unit}" for side in (self.ours, self.peer))
        return (self.name, *sides, value, at_most, self.verdict)


ENOUGH = 20.0  # milliseconds of one measurement; shorter calls are repeated within it


def clock(
    f: Callable[[], Any],
    ready: Callable[[Any], Any] | None,
    number: int = 1,
    timer: Callable[[], float] = time.perf_counter,
) -> float:
    """Milliseconds of a call, the mean of `number`. The last result is dropped off the clock."""
    result = None
    gc.collect()
    gc.disable()  # as timeit does: both sides are spared the same
    try:
        start = timer()
        for _ in range(number):
            result = f()
            if ready is not None:
                ready(result)
        return (timer() - start) * 1e3 / number
    finally:
        gc.enable()


def race(
    name: str,
    ours: Callable[[], Any],
    peer: Callable[[], Any],
    *,
    target: float | None = None,
    repeats: int = 21,
    ready: Callable[[Any], Any] | None = None,
    after: Callable[[], Any] | None = None,
    timer: Callable[[], float] = time.perf_counter,
) -> Row:
    """Times both sides in turns, each first as often as the other, and compares the medians.

    Args:
        ready: Waits for a result, inside the clock (JAX returns before it has computed).
        after: Undoes what a call did, outside the clock (`Module.double` is in place).
        timer: Gives seconds; `time.thread_time` for calls of microseconds, on one thread.
    """
    sides: tuple[Callable[[], Any], ...] = (ours, peer)
    times: dict[Callable[[], Any], list[float]] = {ours: [], peer: []}
    number = dict.fromkeys(sides, 1)
    gc.collect()
    gc.freeze()  # so that the collection before each call looks at what the calls made, not at all
    try:
        for turn in range(-2, repeats):
            for side in sides if turn % 2 else sides[::-1]:
                elapsed = clock(side, ready, number[side], timer)
                if after is not None:
                    after()
                elif turn == -1:  # the first two are warm-up, and say how long a call takes
                    number[side] = max(1, int(ENOUGH / elapsed))
                if turn >= 0:
                    times[side].append(elapsed)
    finally:
        gc.unfreeze()
    return Row(name, statistics.median(times[ours]), statistics.median(times[peer]), target)


HEAD = ("ours / the other", "ours", "the other", "figure", "at most", "")


def table(rows: Iterable[Row]) -> str:
    cells = [HEAD, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i in (0, 5) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
