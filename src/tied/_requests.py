"""What is asked of single arrays, by patterns on their names, and what that asks of storages."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from tied._errors import PathError, TieError
from tied._path import Path
from tied._places import places
from tied._storage import Reader, Storage
from tied._walk import Walk

Through = Callable[[Any, Storage, Reader], Any]
"""Given a request of a leaf, its storage and how it reads that, returns the storage's request."""


class Requests:
    """The requests for the arrays of a model.

    Every name of an array counts, not only the first; the first pattern that fits a name is taken.

    Args:
        found: The walk of the model.
        wanted: What is asked, for each glob on names.
        what: What the requests are, for errors: "axes".

    Raises:
        PathError: A pattern fits no name.
    """

    def __init__(self, found: Walk, wanted: Mapping[str, Any], what: str) -> None:
        self.what = what
        self.asked: dict[int, dict[str, Any]] = {}
        unused = dict.fromkeys(wanted)
        for steps, item in places(found):
            name = str(Path(steps))
            for pattern in wanted:
                if fnmatch.fnmatchcase(name, pattern):
                    unused.pop(pattern, None)
                    self.asked.setdefault(item, {}).setdefault(name, wanted[pattern])
        if unused:
            raise PathError(
                f"no array has such a name: {', '.join(unused)}",
                facts=[("the model has", ", ".join(found.name(i) for i in found.leaves[:12]))],
                hint="What is computed of an array has no place of its own: ask the array",
                paths=list(unused),
            )

    def of(self, storage: Storage, default: Any, through: Through | None = None) -> Any:
        """Returns what is asked of a storage; `default` if nothing is.

        Args:
            storage: One of the model's storages.
            default: What it is then.
            through: What a request of a leaf asks of its storage; the same by default.

        Raises:
            TieError: Two names ask for different things.
        """
        told = [
            (name, request, request if through is None else through(request, storage, reader))
            for reader in storage.readers
            for name, request in self.asked.get(reader.item, {}).items()
        ]
        if not told:
            return default
        one, mine, first = told[0]
        for other, its, seen in told[1:]:
            if seen != first:
                raise TieError(
                    f"two names of one storage ask for different {self.what}",
                    facts=[(one, _shown(mine, first)), (other, _shown(its, seen))],
                    hint="They are one array: ask the same of both, or only of one",
                    paths=[one, other],
                )
        return first


def _shown(request: Any, of_storage: Any) -> str:
    """Returns a request, and what it asks of the storage where that is something else."""
    own, seen = (str(getattr(x, "spec", x)) for x in (request, of_storage))
    return own if own == seen else f"{own}, so {seen} of the storage"
