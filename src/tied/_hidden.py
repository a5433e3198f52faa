"""Arrays inside objects that nothing opens: found, so that none is left behind in silence."""

from __future__ import annotations

import gc
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

from tied._errors import HiddenArrayError, HiddenArrayWarning, TiedError

if TYPE_CHECKING:
    from tied._path import Path
    from tied._walk import Walk

_LIMIT = 2_000  # objects looked at for one closed object
_SKIPPED = (type, types.ModuleType, types.CodeType, types.FrameType, str, bytes, int, float)


def _is_array(x: Any) -> bool:
    roots = ("numpy", "torch", "jax")
    for name, attribute in zip(roots, ("ndarray", "Tensor", "Array"), strict=True):
        module = sys.modules.get(name)
        if module is not None and isinstance(x, getattr(module, attribute, ())):
            array: Any = x
            return not (name == "numpy" and array.dtype.hasobject)
    return False


def captures(function: types.FunctionType) -> bool:
    """Returns whether a function's closure or defaults hold an array that a walk would reach.

    A function's globals are never looked at.
    """
    return find(function, through_objects=False) is not None


def find(x: Any, *, through_objects: bool = True) -> Any:
    """Returns an array that `x` holds; `None` if there is none.

    Looks at attributes, closure cells, defaults and containers, at most 2,000 objects deep in all.

    Args:
        x: An object that nothing opens.
        through_objects: Also ask the garbage collector what other objects refer to.
    """
    seen = {id(x)}
    queue = [x]
    while queue and len(seen) < _LIMIT:
        for part in _parts(queue.pop(), through_objects):
            if id(part) in seen or isinstance(part, _SKIPPED):
                continue
            seen.add(id(part))
            if _is_array(part):
                return part
            queue.append(part)
    return None


def _parts(x: Any, through_objects: bool) -> list[Any]:
    if isinstance(x, types.FunctionType):
        cells = list(x.__closure__ or ())
        return [*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), x.__dict__]
    if isinstance(x, types.CellType):
        try:
            return [x.cell_contents]
        except ValueError:
            return []
    if isinstance(x, (dict, list, tuple, set, frozenset, types.MethodType)) or through_objects:
        return gc.get_referents(x)
    state = getattr(x, "__dict__", None)
    return list(state.values()) if isinstance(state, dict) else []


def arrays(walk: Walk) -> list[tuple[Path, Any, Any]]:
    """Returns (path, object, array) for each closed object of a walk that hides an array."""
    if not walk.closed:
        return []
    found = []
    for node, position, x in walk.closed:
        array = find(x)
        if array is not None:
            found.append((walk.place(node, position), x, array))
    return found


def check(walk: Walk, mode: str) -> None:
    """Warns of, or refuses, arrays that a walk could not reach.

    Args:
        walk: The walk.
        mode: "warn", "raise" or "keep" (say nothing).

    Raises:
        HiddenArrayError: There is one, and the mode is "raise".
        ValueError: The mode is another.
    """
    if mode not in ("warn", "raise", "keep"):
        raise TiedError(f"hidden={mode!r} is unknown", hint='Type "warn", "raise" or "keep"')
    if mode == "keep":
        return
    for path, x, array in arrays(walk):
        where = str(path) or "the model"
        shape = tuple(getattr(array, "shape", ()))
        facts = [("object", f"{where}, a {type(x).__name__}"), ("array", f"shape {shape}")]
        hint = 'Say how it comes apart with tied.register, or that it may stay: hidden="keep"'
        message = "an array hides in an object that can't be taken apart"
        if mode == "raise":
            raise HiddenArrayError(message, facts=facts, hint=hint, paths=[where])
        text = TiedError(f"{message}; it stays as it is", facts=facts, hint=hint).render()
        warnings.warn(text, HiddenArrayWarning, stacklevel=4)
