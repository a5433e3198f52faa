"""A model without its arrays: `split` takes the arrays out, `merge` puts them back."""

from __future__ import annotations

import fnmatch
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from tied import _unreached
from tied._errors import MergeError, TiedError, TieError
from tied._node import Node, kinds
from tied._path import Path
from tied._plan import Plan, attach_to, same_plan
from tied._reading import located
from tied._spread import spread
from tied._storage import Storage, storages
from tied._walk import EXTRAS, STATIC, Record, Walk, steady, walk
from tied.arrays import Library
from tied.nodes.containers import OBJECT_ARRAY


class Skeleton:
    """A model without its arrays: containers, layers, settings, and what each leaf reads.

    It is immutable and holds no array. It hashes (the same in every process), compares with `==`
    and pickles, so it is a static argument of `jax.jit` and a part of a file.

    Attributes:
        names: The names of the storages, in walk order.
        storages: What each of them is and who reads it; no arrays.
    """

    __slots__ = ("_hash", "_plan", "names", "storages")

    def __init__(self, plan: Plan, found: tuple[Storage, ...]) -> None:
        self._plan = plan
        self.storages = found
        self._hash: int | None = None
        self.names = tuple(storage.name for storage in found)

    @steady()
    def merge(self, *parts: Mapping[str, Any], plain: bool = False) -> Any:
        """Returns the model over these storages.

        Args:
            *parts: Dicts from name to array, together one for each storage.
            plain: Give ordinary arrays in the place of each `View` and `Derived`, for code that
                knows arrays only. They are computed from the storages, so gradients still add up.

        Returns:
            A new model. Its leaves share the memory of the storages. A PyTorch storage that is a
            `Parameter` gives leaves of autograd, as in the model that was split; any other tensor
            that gradients flow through gives leaves that are connected to it, so that its
            gradient is the sum over all uses.

        Raises:
            MergeError: A storage is missing, unknown, given twice, or of another shape.
        """
        given = self._gathered(parts)
        items: list[Any] = [None] * self._plan.count
        for storage in self.storages:
            name, library, shape, _, _, whole, readers = storage
            array = given[name]
            kind = kinds[type(array)]
            if not isinstance(kind, Library):
                self._refuse(storage, array)
            elif kind.name != "opaque" and kind.shape(array) != shape:
                raise _misshaped(storage, kind.shape(array))
            elif whole == 0 and len(readers) == 1 and kind.name == library:
                items[readers[0].item] = kind.dress(array, readers[0].meta)
                continue
            for item, leaf in _spread(storage, array):
                items[item] = leaf
        if plain:
            items = [_unlazy(x) for x in items]
            self._refuse_placeholders(given)
        return self._plan.build(
            items, lambda leaf, extras: attach_to(items, leaf, extras), plain=plain
        )

    def _gathered(self, parts: tuple[Mapping[str, Any], ...]) -> Mapping[str, Any]:
        given: dict[str, Any] = {}
        for part in parts:
            if not isinstance(part, Mapping):
                raise MergeError(
                    f"merge takes dicts from name to array, not {type(part).__name__}",
                    hint="Give merge every dict that split returned",
                )
            twice = given.keys() & part.keys()
            if twice:
                raise MergeError(
                    f"a storage is given twice: {min(twice) or 'the model'}",
                    hint="Give each dict that split returned once",
                    paths=sorted(twice),
                )
            given.update(part)
        known = dict.fromkeys(self.names)
        if given.keys() != known.keys():
            self._refuse_names(given, known)
        return given

    def _refuse_names(self, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        missing = [name for name in self.names if name not in given]
        unknown = [str(name) for name in given if name not in known]
        facts = [("missing", name or "the model") for name in missing[:8]]
        facts += [("unknown", name) for name in unknown[:8]]
        raise MergeError(
            "these storages are not those of the skeleton",
            facts=facts,
            hint="Give merge every dict that split returned, with the same names",
            paths=[*missing, *unknown],
        )

    def _refuse_placeholders(self, given: Mapping[str, Any]) -> None:
        """Raises where something is computed, but not of arrays."""
        if any(record.node.derived for record in self._plan.records):
            for storage in self.storages:
                kind = kinds[type(given[storage.name])]
                if not isinstance(kind, Library) or kind.name == "opaque":
                    raise _no_array(storage, given[storage.name])

    def _refuse(self, storage: Storage, array: Any) -> None:
        """Raises for what is no array; JAX and others put placeholders there, which pass."""
        if storage.plain and not isinstance(array, _NEVER):
            return
        if isinstance(array, np.generic):
            return
        raise _no_array(storage, array)

    def __hash__(self) -> int:
        if self._hash is None:
            import hashlib  # loads OpenSSL, which nothing else here needs

            text = "\n".join(_outline(self._plan, self.storages))
            digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
            self._hash = int.from_bytes(digest, "big")
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Skeleton) or hash(self) != hash(other):
            return False
        return self.storages == other.storages and same_plan(self._plan, other._plan)

    def __reduce__(self) -> Any:
        plan = self._plan
        rows = [
            (
                r.item,
                _portable(r),
                _frozen(r.keys),
                r.values,
                r.holes,
                r.static,
                _tag(r.node),
            )
            for r in plan.records
        ]
        return _revive, (rows, plan.count, plan.root, plan.model, plan.cyclic, plan.hung,
                         self.storages)  # fmt: skip

    def __repr__(self) -> str:
        kind = "model" if self._plan.root == STATIC else _root_name(self._plan)
        return f"<Skeleton of a {kind}: {len(self.names)} storages>"


_NEVER = (int, float, complex, str, bytes, list, tuple, dict, set)


def _no_array(storage: Storage, array: Any) -> MergeError:
    return MergeError(
        f"a storage must be an array: {storage.name or 'the model'}",
        facts=[("given", "None" if array is None else type(array).__name__)],
        hint="Give the array that split gave, or one of the same shape",
        paths=[storage.name],
    )


def _misshaped(storage: Storage, shape: tuple[int, ...]) -> MergeError:
    return MergeError(
        f"a storage has another shape than the skeleton's: {storage.name or 'the model'}",
        facts=[("skeleton", str(storage.shape)), ("given", str(shape))],
        hint="merge needs the shapes that split gave; to change shapes, use tied.map",
        paths=[storage.name],
    )


def _spread(storage: Storage, array: Any) -> list[tuple[int, Any]]:
    try:
        return spread(storage, array)
    except TiedError as error:
        raise located(error, storage) from error


def _root_name(plan: Plan) -> str:
    records = [record for record in plan.records if record.item == plan.root]
    return records[0].cls.__name__ if records else "bare array"


_TAGGED: dict[str, Node] = {"extras": EXTRAS, "objects": OBJECT_ARRAY}


def _tag(node: Node) -> str:
    """Returns the name of a node that its type does not lead to."""
    return next((tag for tag, tagged in _TAGGED.items() if tagged is node), "")


def _portable(record: Record) -> Any:
    """Returns a type, or what leads to one that pickle does not find by its own name."""
    found = [name for name, value in vars(types).items() if value is record.cls]
    return found[0] if found else record.node.portable(record.cls)


def _revived(told: Any) -> type:
    if isinstance(told, tuple):
        make, *arguments = told
        made: type = make(*arguments)
        return made
    found: type = getattr(types, told) if isinstance(told, str) else told
    return found


def _frozen(keys: Any) -> Any:
    return keys if isinstance(keys, (tuple, range)) else tuple(keys)


def _revive(
    rows: Any, count: int, root: int, model: Any, cyclic: bool, hung: Any, found: Any
) -> Skeleton:
    plan = Plan.__new__(Plan)
    plan.records = []
    for item, named, keys, values, holes, static, tag in rows:
        cls = _revived(named)
        node: Any = _TAGGED.get(tag) or kinds[cls]
        record = Record(item, node, cls, keys, values, static)
        record.holes = holes
        plan.records.append(record)
    plan.count, plan.root, plan.model, plan.cyclic, plan.hung = count, root, model, cyclic, hung
    return Skeleton(plan, found)


def _outline(plan: Plan, found: tuple[Storage, ...]) -> Any:
    """Gives lines that say the structure of a skeleton and are the same in every process."""
    for record in plan.records:
        keys = [str(key) if isinstance(key, (str, int, tuple)) else "" for key in record.keys]
        yield f"{record.item} {record.cls.__qualname__} {keys} {record.holes}"
    for s in found:
        readers = [(r.item, r.layout, r.library) for r in s.readers]
        yield f"{s.name} {s.shape} {s.dtype} {s.order} {s.whole} {readers}"


def _unlazy(x: Any) -> Any:
    kind = kinds[type(x)]
    return x.read() if isinstance(kind, Library) and kind.name == "lazy" else x


@steady()
def split(
    model: Any, *filters: Any, conflict: str = "raise", hidden: str = "warn"
) -> tuple[Any, ...]:
    """Takes a model apart into a skeleton and its storages.

    Args:
        model: Any object. It is not changed.
        *filters: Which storages go into which dict: a type (of the array, or of the object that
            holds it, as `flax.nnx.Param`), a glob on the name (`"encoder.*"`), a function of
            (path, array), or `...` for all. The first filter that fits takes the storage.
        conflict: What to do with a storage whose leaves fall under different filters: "raise", or
            "first", which gives it to the first of them.
        hidden: What to do about arrays in objects that nothing opens: "warn", "raise", "keep".

    Returns:
        (skeleton, storages) without filters; (skeleton, one dict a filter, the rest) with some.
        The dicts go from name to array, in walk order, and share memory with the model: the array
        of a storage is its representative itself, or a new array over the span that is read. What
        PyTorch keeps in `.grad` is not part of them.

    Raises:
        TieError: A storage falls under two filters and `conflict` is "raise".
        HiddenArrayError: An array is hidden and `hidden` is "raise".

    >>> import numpy as np, tied
    >>> W = np.ones((2, 3))
    >>> skeleton, storages = tied.split({"enc": W, "dec": W.T})
    >>> list(storages), skeleton.merge(storages)["dec"].shape
    (['enc'], (3, 2))
    """
    if conflict not in ("raise", "first"):
        raise TiedError(f"conflict={conflict!r} is unknown", hint='Type "raise" or "first"')
    found = walk(model, extras=True)
    _unreached.check(found, hidden)
    pairs = named(storages(found))
    skeleton_storages = tuple([storage for storage, _ in pairs])
    parts: list[dict[str, Any]] = [{} for _ in range(len(filters) + 1)]
    for storage, array in pairs:
        place = _sorted_into(found, storage, filters, conflict) if filters else 0
        parts[place][storage.name] = array
    return Parts((Skeleton(Plan(found, model), skeleton_storages), *parts))


class Parts(tuple[Any, ...]):
    """What `split` returns: a tuple whose pickle holds the elements that are read and no more.

    PyTorch pickles the whole buffer of a tensor that reads a part of one (pytorch#40157).
    """

    __slots__ = ()

    def __reduce__(self) -> Any:
        skeleton, *parts = self
        small = [{name: _compact(x) for name, x in part.items()} for part in parts]
        return tuple, ([skeleton, *small],)


def _compact(x: Any) -> Any:
    kind = kinds[type(x)]
    return kind.compact(x) if isinstance(kind, Library) else x


def named(pairs: list[tuple[Storage, Any]]) -> list[tuple[Storage, Any]]:
    """Makes names unique: keys with dots in them can give one name to two places."""
    if len({storage.name for storage, _ in pairs}) == len(pairs):
        return pairs
    taken: set[str] = set()
    named = []
    for storage, array in pairs:
        name, n = storage.name, 1
        while name in taken:
            n += 1
            name = f"{storage.name}#{n}"
        taken.add(name)
        named.append((storage if n == 1 else storage._replace(name=name), array))
    return named


def _sorted_into(
    found: Walk,
    storage: Storage,
    filters: tuple[Any, ...],
    conflict: str,
) -> int:
    """Returns the number of the filter that takes a storage."""
    places: dict[int, str] = {}
    for reader in storage.readers:
        place = _first_fit(found, reader.item, filters)
        places.setdefault(place, reader.path)
    if len(places) > 1 and conflict != "first":
        facts = [
            (f"filter {n}" if n < len(filters) else "rest", path)
            for n, path in sorted(places.items())
        ]
        raise TieError(
            "one storage falls under different filters",
            facts=facts,
            hint='Sort its leaves alike, or type: tied.split(..., conflict="first")',
            paths=places.values(),
        )
    return min(places)


def _first_fit(found: Walk, item: int, filters: tuple[Any, ...]) -> int:
    for n, wanted in enumerate(filters):
        if _fits(found, item, wanted):
            return n
    return len(filters)


def _fits(found: Walk, item: int, wanted: Any) -> bool:
    array = found.objects[item]
    if wanted is ...:
        return True
    if isinstance(wanted, type):
        parent = found.parents[item]
        return isinstance(array, wanted) or (
            parent >= 0 and isinstance(found.objects[parent], wanted)
        )
    if isinstance(wanted, str):
        return fnmatch.fnmatchcase(found.name(item), wanted)
    path: Path = found.path(item)
    return bool(wanted(path, array))


def merge(skeleton: Skeleton, *parts: Mapping[str, Any], plain: bool = False) -> Any:
    """Puts a model together again; `merge(*split(model))` equals the model.

    The same as `skeleton.merge(*parts)`: see `Skeleton.merge` for what is shared and raised.

    Args:
        skeleton: The first thing that `split` returned.
        *parts: Dicts from name to array, together one for each storage.
        plain: Give ordinary arrays where JAX has no views.

    Returns:
        A new model over these arrays.
    """
    return skeleton.merge(*parts, plain=plain)
