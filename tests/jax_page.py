"""The page docs/matrix-jax.md: written from the cells of JAX's matrix, and read back into them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from jax_cells import APART, EXEMPT, GROUPS, NEVER, OPS, Cell
from jax_hosts import HOSTS
from jax_kinds import KINDS
from matrix_page import ARROW, grid, title, words

PAGE = Path(__file__).parent.parent / "docs" / "matrix-jax.md"
Cells = dict[Cell, tuple[str, str]]  # (host, kind, operation) -> by itself, after `tied`
CELL = re.compile(rf"(?P<alone>{APART}|\S+)(?:{ARROW}(?P<tied>\S+))?(?: \(\d+\))?")
TIED = [name for name, kind in KINDS.items() if kind.tied]
OTHERS = [name for name, kind in KINDS.items() if not kind.tied]

HEAD = """\
# Survival matrix: JAX

The arrays of a model are tied in every way that we know of: one array at two places, a transpose, a
slice. Then comes an operation of JAX, or of a library over it. Are they still tied? Each cell says
what becomes of the tie in the framework by itself, and after one line, `tied.tie`:

    lost → kept

Where both end alike there is one word.

| word | what it says |
|---|---|
| kept | A change is seen by all, values are right, a step is by the sum of gradients. |
| lost | They have come apart, and nothing says so. |
| wrong | Still tied, with wrong values. |
| made | Two arrays that were not tied have become one. |
| never tied | The framework has no such tie: the model holds copies, which train apart. |
| error | The framework or the tool raises. |
| refused | A `tied.TieError` that names both sides. |
| - | Can't be done to such a model. |

JAX has no views, so by itself it knows one tie: the same array, or the same layer, at two places.
Dicts, Equinox modules and variables of linen become a `tied.Bundle`, which is a pytree; an NNX
module is tied in place. Every cell that is kept after `tied.tie` also gives each memory to the
operation once.

Not judged here is `eqx.nn.Shared`, a wrapper that a model is called through: it keeps any tie
through gradients and `jax.tree.map`; `jit` can't return it, and it forgets what `tree_at` writes to
the second side.

{summary}

`make matrix` runs all cells and writes this page; the tests run them too, and compare. The same for
[PyTorch](matrix.md).
"""
NOTES = """\
## What is not kept after `tied.tie`

{notes}
"""


def heading(host: str, group: str) -> str:
    """A table's heading; the framework alone where it has one table."""
    name = HOSTS[host].title
    return name if len(GROUPS[host]) == 1 else f"{name}: {group}"


def render(cells: Cells) -> str:
    """Returns the page."""
    parts = [HEAD.format(summary=summary(cells))]
    for host, groups in GROUPS.items():
        for group, ops in groups.items():
            parts.append(f"## {heading(host, group)}\n\n{table(cells, host, ops)}")
    parts.append(NOTES.format(notes="\n".join(notes())))
    return "\n".join(parts)


def table(cells: Cells, host: str, ops: dict[str, object]) -> str:
    def cell(name: str, op: str) -> str:
        return words(*cells[host, name, op], note(host, name, op))

    named = {op: OPS[host, op].title for op in ops}
    tied = grid("tie", TIED, named, cell)
    return tied + "".join(grid("", OTHERS, named, cell).splitlines(keepends=True)[2:])


def note(host: str, name: str, op: str) -> int | None:
    return next((i for i, e in enumerate(EXEMPT, 1) if (host, name, op) in e.cells()), None)


def summary(cells: Cells) -> str:
    """Counts what becomes of ties."""
    alone, after = Counter(), Counter()
    for (_, name, _), pair in cells.items():
        if KINDS[name].tied and pair != (NEVER, NEVER):
            alone[pair[0]] += 1
            after[pair[1]] += 1
    return (
        f"Of {alone.total()} cells with a tie, the frameworks by themselves have no such tie in "
        f"{alone[APART]}; of the others they keep {alone['kept']}, in "
        f"{alone['lost'] + alone['wrong']} the tie is lost or wrong without a word, and "
        f"{alone['error']} end in an error. After `tied.tie` {after['kept']} are kept, "
        f"{after['refused'] + after['error']} end in an error, and "
        f"{after['lost'] + after['wrong'] or 'none'} is lost or wrong."
    )


def notes() -> list[str]:
    """A line for each set of cells that is not kept, numbered as in the tables."""
    found = []
    for number, one in enumerate(EXEMPT, 1):
        hosts = ", ".join(HOSTS[host].title for host in one.hosts.split())
        names = ", ".join(title(name) for name in one.kinds.split())
        host = one.hosts.split()[0]
        ops = ", ".join(OPS[host, op].title for op in one.ops.split())
        found.append(f"{number}. {hosts}; {names}; {ops}: *{one.verdict}*. {one.why}")
    return found


def parse(page: str) -> Cells:
    """Returns the cells of a page."""
    headings = {heading(host, group): (host, list(ops)) for host, groups in GROUPS.items()
                for group, ops in groups.items()}  # fmt: skip
    keys = {title(name): name for name in KINDS}
    cells: Cells = {}
    host, ops = "", list[str]()
    for line in page.splitlines():
        first, *rest = [part.strip() for part in line.strip("|").split("|")]
        if line.startswith("#"):
            host, ops = headings.get(line.lstrip("# "), ("", []))
        elif ops and first in keys and line.startswith("|"):
            for op, text in zip(ops, rest, strict=True):
                found = CELL.fullmatch(text)
                assert found is not None, f"no cell: {text}"
                cells[host, keys[first], op] = (found["alone"], found["tied"] or found["alone"])
    return cells
