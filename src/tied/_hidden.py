"""Arrays inside objects that nothing opens: found, so that none is left behind in silence."""

from __future__ import annotations

import gc
import sys
import types
from typing import Any

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

    Looks at attributes, closure cells, defaults and containers, at most 2,000 objects in all.

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
