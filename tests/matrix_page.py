"""The page docs/matrix.md: written from the cells of the matrix, and read back into them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kinds import KINDS
from torch_cells import EXEMPT, NAMES, NEVER, SPAWN
from torch_operations import GROUPS

PAGE = Path(__file__).parent.parent / "docs" / "matrix.md"
Cells = dict[tuple[str, str], tuple[str, str]]  # (kind, operation) -> by itself, after `tied.tie`

TITLES = {
    group: {key: op.title for key, op in ops.items()} for group, ops in GROUPS.items()
}  # fmt: skip
TITLES["Copies and files"][SPAWN] = "`multiprocessing` spawn"
ARROW = " → "
CELL = re.compile(r"(?P<alone>\S+)(?: → (?P<tied>\S+))?(?: \(\d+\))?")

HEAD = """\
# Survival matrix

Two tensors of a PyTorch module read one memory, in every way that we know of. Then comes an
operation of PyTorch, or of a tool around it. Are they still tied? Each cell says what becomes of
the tie in PyTorch by itself, and after one line, `tied.tie(model)`:

    lost → kept

Where both end alike there is one word.

| word | what it says |
|---|---|
| kept | A write to one is seen in the other, values are right, a step is by the sum of gradients. |
| lost | They have come apart, and nothing says so. |
| wrong | Still one memory, with wrong values: a step was taken twice, a conjugation is gone. |
| made | Two tensors that were not tied have become one. |
| error | PyTorch or the tool raises. |
| refused | `tied.TieError`, at the latest where the tensor is read. It names both sides. |
| - | Can't be done to such a model. |

{summary}

`make matrix` runs all cells and writes this page; the tests run them too, and compare. The same for
[JAX, Equinox, NNX and linen](matrix-jax.md).
"""
NOT_TIED = """\
## What is no tie

Tensors with memory of their own, and tensors side by side in one buffer. `tied.tie` leaves them
alone: *kept* says that each still has its own elements.
"""
NOTES = """\
## What is not kept after `tied.tie`

{notes}
"""


def title(name: str) -> str:
    return name.removeprefix("no_tie_").replace("_", " ")


def render(cells: Cells) -> str:
    """Returns the page."""
    tied = [name for name in NAMES if KINDS[name].tied]
    apart = [name for name in NAMES if not KINDS[name].tied]
    parts = [HEAD.format(summary=summary(cells, tied))]
    parts += [f"## {group}\n\n{table(cells, tied, group)}" for group in TITLES]
    parts.append(NOT_TIED)
    parts += [f"### {group}: no ties\n\n{table(cells, apart, group)}" for group in TITLES]
    parts.append(NOTES.format(notes="\n".join(notes())))
    return "\n".join(parts)


def table(cells: Cells, names: list[str], group: str) -> str:
    first = "tie" if KINDS[names[0]].tied else "tensors"
    return grid(first, names, TITLES[group], lambda name, op: show(cells, name, op))


def grid(first: str, names: list[str], ops: dict[str, str], cell: Callable[[str, str], str]) -> str:
    """A table with a line for each kind, and a column for each operation by its words."""
    lines = [[first, *ops.values()]]
    lines += [[title(name), *(cell(name, op) for op in ops)] for name in names]
    text = [f"| {' | '.join(line)} |\n" for line in lines]
    return "".join([text[0], "|" + "---|" * len(lines[0]) + "\n", *text[1:]])


def show(cells: Cells, name: str, op: str) -> str:
    number = next((i for i, e in enumerate(EXEMPT, 1) if (name, op) in e.cells()), None)
    return words(*cells[name, op], number)


def words(alone: str, after: str, number: int | None) -> str:
    """What a cell says: both ends, and the number of the note."""
    found = alone if alone == after else alone + ARROW + after
    return f"{found} ({number})" if number else found


def summary(cells: Cells, names: list[str]) -> str:
    """Counts what becomes of ties."""
    alone, after = Counter(), Counter()
    for (name, _), pair in cells.items():
        if name in names and pair != (NEVER, NEVER):
            alone[pair[0]] += 1
            after[pair[1]] += 1
    total = alone.total()
    return (
        f"Of {total} cells with a tie, PyTorch by itself keeps {alone['kept']}; in "
        f"{alone['lost'] + alone['wrong']} the tie is lost or wrong without a word, and "
        f"{alone['error']} end in an error. After `tied.tie` {after['kept']} are kept, "
        f"{after['refused'] + after['error']} end in an error, and "
        f"{after['lost'] + after['wrong'] or 'none'} is lost or wrong."
    )


def notes() -> list[str]:
    """A line for each set of cells that is not kept, numbered as in the tables."""
    found = []
    for number, one in enumerate(EXEMPT, 1):
        names = ", ".join(title(name) for name in one.kinds.split())
        words = {key: word for ops in TITLES.values() for key, word in ops.items()}
        ops = ", ".join(words[op] for op in one.ops.split())
        found.append(f"{number}. {names}; {ops}: *{one.verdict}*. {one.why}")
    return found


def parse(page: str) -> Cells:
    """Returns the cells of a page."""
    keys = {title(name): name for name in NAMES}
    cells: Cells = {}
    ops: list[str] = []
    for line in page.splitlines():
        first, *rest = [part.strip() for part in line.strip("|").split("|")]
        if heading := re.fullmatch(r"##+ (.*?)(: no ties)?", line):
            ops = list(TITLES.get(heading[1], ()))
        elif ops and first in keys and line.startswith("|"):
            for op, text in zip(ops, rest, strict=True):
                found = CELL.fullmatch(text)
                assert found is not None, f"no cell: {text}"
                cells[keys[first], op] = (found["alone"], found["tied"] or found["alone"])
    return cells
