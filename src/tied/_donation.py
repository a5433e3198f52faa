"""Buffers that stand at several places among the arguments of a call that donates them."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

from tied import arrays
from tied._errors import TiedError, TieError


def check_donation(
    args: tuple[Any, ...], *, donate: Collection[int] | None = None, dedup: bool = False
) -> tuple[Any, ...]:
    """Makes sure that `jax.jit` can donate arguments, or makes it so.

    JAX donates each leaf of an argument by itself. A buffer that is donated and stands anywhere
    else among the arguments is an error at best, which names no path (jax#9635, jax#12627). Two
    arrays may be one buffer though they are two objects: `jax.device_put` to where an array is
    gives that, and so may a fresh optimizer state.

    Args:
        args: The positional arguments of the call, a tuple of pytrees.
        donate: The indices of those that are donated, as `donate_argnums`; all of them by default.
        dedup: Copy each repeat of a donated buffer, instead of raising.

    Returns:
        The arguments. Arrays are the same objects, but for copies of repeats.

    Raises:
        TieError: A donated buffer stands at two places; or an array was donated before. The error
            names the paths: `0.embed` is in the first argument.

    >>> import jax.numpy as jnp, tied
    >>> W = jnp.ones((2, 3))
    >>> args = tied.check_donation(({"embed": W, "head": W},), dedup=True)
    >>> args[0]["embed"] is W, args[0]["head"] is W
    (True, False)
    """
    library = arrays.load("jax")
    import jax

    if not isinstance(args, tuple):
        raise TiedError(
            f"args is a tuple of arguments, not {type(args).__name__}",
            hint="For one argument type: tied.check_donation((model,))",
        )
    structure: Any
    flat, structure = jax.tree_util.tree_flatten_with_path(args)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
    leaves = [leaf for _, leaf in flat]
    donated = {
        number for number, (path, _) in enumerate(flat) if donate is None or path[0].idx in donate
    }
    groups = [
        group for group in _one_buffer(names, leaves) if len(group) > 1 and donated & {*group}
    ]
    if groups and not dedup:
        _refuse(names, leaves, groups)
    for number in [number for group in groups for number in group[1:]]:
        leaves[number] = library.copy(leaves[number])
    checked: tuple[Any, ...] = structure.unflatten(leaves)
    return checked


def _one_buffer(names: list[str], leaves: list[Any]) -> list[list[int]]:
    """Returns the numbers of the arrays that are, or partly are, over one buffer."""
    groups: dict[int, list[int]] = {}
    owner: dict[Hashable, int] = {}
    for number, leaf in enumerate(leaves):
        buffers = _buffers(names[number], leaf)
        met = sorted({owner[buffer] for buffer in buffers if buffer in owner})
        first = met[0] if met else number
        groups.setdefault(first, []).append(number)
        for other in met[1:]:
            groups[first] = sorted(groups[first] + groups.pop(other))
            owner.update({buffer: first for buffer, own in owner.items() if own == other})
        owner.update(dict.fromkeys(buffers, first))
    return list(groups.values())


def _buffers(name: str, leaf: Any) -> list[Hashable]:
    """Returns what an array of JAX is over: an address on each of its devices."""
    import jax

    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not leaf.size:
        return []
    if leaf.is_deleted():
        raise TieError(
            f"{name} was donated or deleted before",
            hint="Use what the call that donated it returned",
            paths=[name],
        )
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return [
        (shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards
    ]


def _refuse(names: list[str], leaves: list[Any], groups: list[list[int]]) -> None:
    paths = [[names[number] for number in group] for group in groups]
    facts = [
        (f"{leaves[group[0]].nbytes:,} B", ", ".join(path))
        for group, path in zip(groups[:8], paths[:8], strict=True)
    ]
    raise TieError(
        "a donated buffer stands at several places",
        facts=facts,
        hint="Donate a tied.Bundle, which holds it once, or copy the repeats:"
        " tied.check_donation(args, dedup=True)",
        paths=[name for path in paths for name in path],
    )
