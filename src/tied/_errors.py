"""What can go wrong, and what is only worth a warning.

Each error holds data: the sentence, the paths it speaks of, labelled facts and what to type. The
text is rendered from them, always in the same shape.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable


class TiedError(Exception):
    """The base of every error that this library raises.

    Attributes:
        paths: The places in the model that the error speaks of, as strings.
    """

    def __init__(
        self,
        message: str,
        *,
        facts: Iterable[tuple[str, str]] = (),
        hint: str = "",
        paths: Iterable[object] = (),
    ) -> None:
        self.message = message
        self.facts = tuple(facts)
        self.hint = hint
        self.paths = tuple(str(path) for path in paths)
        super().__init__(self.render())

    def render(self) -> str:
        """Returns the sentence, one line for each fact, and what to type."""
        width = max((len(label) for label, _ in self.facts), default=0)
        lines = [self.message]
        lines += [f"  {label:<{width}}  {text}" for label, text in self.facts]
        if self.hint:
            lines.append(f"  {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.facts, self.hint, self.paths)


def _rebuild(
    cls: type[TiedError],
    message: str,
    facts: tuple[tuple[str, str], ...],
    hint: str,
    paths: tuple[str, ...],
) -> TiedError:
    return cls(message, facts=facts, hint=hint, paths=paths)


class TieError(TiedError, ValueError):
    """A tie can't be kept as asked."""


class MergeError(TiedError, ValueError):
    """Storages do not fit the skeleton."""


class MatchError(TiedError, ValueError):
    """Two models do not have the same parts."""


class PathError(TiedError, LookupError):
    """A path leads nowhere."""


class HiddenArrayError(TiedError, ValueError):
    """An object that can't be taken apart holds an array (under `hidden="raise"`)."""


class DeviceError(TiedError, ValueError):
    """A device is unknown, or an array can't be moved to it."""


class DtypeError(TiedError, TypeError):
    """An array can't have the dtype that is asked for."""


class LibraryError(TiedError, ImportError):
    """An array library is needed and not installed."""


class ConventionError(TiedError, ValueError):
    """Separate gradients do not follow the convention that was named."""


class UntiedError(TiedError, ValueError):
    """A tie was lost or made where none should be."""


class FileError(TiedError, ValueError):
    """A checkpoint can't be read as what it says it is, or does not fit what it is read into."""


class TiedWarning(UserWarning):
    """The base of every warning that this library gives."""


class HiddenArrayWarning(TiedWarning):
    """An object that can't be taken apart holds an array, which stays as it is."""


class DeviceWarning(TiedWarning):
    """No accelerator was found."""


class UntiedWarning(TiedWarning):
    """Ties were lost or made while a model was watched."""


def callers_level() -> int:
    """Returns the `stacklevel` at which the caller's own line is, however deep in the package."""
    frame, level = sys._getframe(1), 1
    ours = ("tied.", "contextlib")
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(ours):
        frame, level = frame.f_back, level + 1
    return level
