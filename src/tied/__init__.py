"""tied keeps shared weights shared: a model is a skeleton and storages, and ties are kept."""

import importlib
from typing import TYPE_CHECKING, Any

from tied._bundle import Bundle
from tied._cast import bf16, cast, f16, f32, f64
from tied._compare import Comparison, TieChange, check, compare, watch
from tied._donation import check_donation
from tied._errors import (
    ConventionError,
    DeviceError,
    DeviceWarning,
    DtypeError,
    FileError,
    HiddenArrayError,
    HiddenArrayWarning,
    LibraryError,
    MatchError,
    MergeError,
    PathError,
    TiedError,
    TiedWarning,
    TieError,
    UntiedError,
    UntiedWarning,
)
from tied._gradient import accumulate
from tied._layout import Layout
from tied._lazy import adjoint, diagonal, permute, transpose, view
from tied._map import copy, map
from tied._move import cpu, empty, gpu, to
from tied._node import leaf, node, register
from tied._path import Path
from tied._skeleton import Skeleton, merge, split
from tied._structured import (
    Bidiagonal,
    Cholesky,
    Derived,
    Diagonal,
    Hermitian,
    LowerTriangular,
    Symmetric,
    Tridiagonal,
    UpperTriangular,
)
from tied._tie import Adoption, tie, untie
from tied._ties import LeafReport, StorageReport, Ties, ties
from tied._vector import ravel
from tied._where import shares, span
from tied.arrays import Span
from tied.arrays.view import View

if TYPE_CHECKING:
    from tied._checkpoint import load, save
    from tied._discover import Discovered, Finding, discover
    from tied._load_into import Loaded, load_into

__version__ = "0.1.0"

__all__ = [
    "Adoption",
    "Bidiagonal",
    "Bundle",
    "Cholesky",
    "Comparison",
    "ConventionError",
    "Derived",
    "DeviceError",
    "DeviceWarning",
    "Diagonal",
    "Discovered",
    "DtypeError",
    "FileError",
    "Finding",
    "Hermitian",
    "HiddenArrayError",
    "HiddenArrayWarning",
    "Layout",
    "LeafReport",
    "LibraryError",
    "Loaded",
    "LowerTriangular",
    "MatchError",
    "MergeError",
    "Path",
    "PathError",
    "Skeleton",
    "Span",
    "StorageReport",
    "Symmetric",
    "TieChange",
    "TieError",
    "TiedError",
    "TiedWarning",
    "Ties",
    "Tridiagonal",
    "UntiedError",
    "UntiedWarning",
    "UpperTriangular",
    "View",
    "accumulate",
    "adjoint",
    "bf16",
    "cast",
    "check",
    "check_donation",
    "compare",
    "copy",
    "cpu",
    "diagonal",
    "discover",
    "empty",
    "f16",
    "f32",
    "f64",
    "gpu",
    "leaf",
    "load",
    "load_into",
    "map",
    "merge",
    "node",
    "permute",
    "ravel",
    "register",
    "save",
    "shares",
    "span",
    "split",
    "tie",
    "ties",
    "to",
    "transpose",
    "untie",
    "view",
    "watch",
]


_LATER = {
    "Discovered": "tied._discover",
    "Finding": "tied._discover",
    "discover": "tied._discover",
    "load": "tied._checkpoint",
    "save": "tied._checkpoint",
    "Loaded": "tied._load_into",
    "load_into": "tied._load_into",
}
_PARTS = ("torch", "jax", "nnx")


def __getattr__(name: str) -> Any:
    """Loads what not every program needs when it is asked for: files, `tied.torch`, `tied.nnx`."""
    if name in _PARTS:
        return importlib.import_module(f"tied.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'tied' has no attribute {name!r}")
