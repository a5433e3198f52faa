"""A bar for work that takes long: bytes, bytes per second, what is left; on a terminal only."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType

from tied._cli.printing import coloured, is_terminal, paint
from tied._ties import said_bytes

DELAY = 0.5
"""Seconds until a bar appears; work that is done by then needs none."""

_EVERY = 0.1


class Progress:
    """A bar on stderr, as a context manager; it is wiped when the work ends.

    Args:
        doing: What is being done: "packing".
        total: The bytes of all of it.
    """

    def __init__(self, doing: str, total: int) -> None:
        self._doing = doing
        self._total = total
        self._done = 0
        self._shown = is_terminal(sys.stderr)
        self._colour = coloured(sys.stderr)
        self._start = time.monotonic()
        self._next = self._start + DELAY
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __call__(self, nbytes: int) -> None:
        """Tells that so many more bytes are done."""
        self._done += nbytes
        if self._shown and (now := time.monotonic()) >= self._next:
            self._next = now + _EVERY
            self._drawn = True
            columns = shutil.get_terminal_size().columns
            sys.stderr.write("\r\x1b[K" + self._line(now - self._start, columns - 1))
            sys.stderr.flush()

    def reach(self, done: int, total: int) -> None:
        """Tells how many bytes are done, and of how many."""
        self._total = total
        self(done - self._done)

    def _line(self, seconds: float, columns: int) -> str:
        share = min(1.0, self._done / self._total) if self._total else 1.0
        speed = self._done / seconds if seconds > 0 else 0.0
        left = (self._total - self._done) / speed if speed else 0.0
        text = (
            f"{share:4.0%}  {said_bytes(self._done)} of {said_bytes(self._total)}  "
            f"{said_bytes(int(speed))}/s  {_clock(left)} left"
        )
        room = columns - len(self._doing) - len(text) - 4
        if room < 8:
            return f"{self._doing} {text}"[:columns]
        width = min(room, 30)
        full = int(share * width)
        bar = paint("good", "━" * full, self._colour) + " " * (width - full)
        return f"{self._doing}  {bar}  {text}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
