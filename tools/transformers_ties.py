"""Writes what each text architecture of transformers ties into docs/transformers.md.

Run it as `python tools/transformers_ties.py`; `make matrix` does. The models are those of
tests/architectures.py, tiny and with random weights.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
tied = importlib.import_module("tied")
architectures = importlib.import_module("architectures")

PAGE = ROOT / "docs" / "transformers.md"
BEGIN = "<!-- begin: made by tools/transformers_ties.py -->"
END = "<!-- end -->"
NOTHING = "nothing"

Pattern = tuple[tuple[str, tuple[str, ...]], ...]
"""(kept name, further names) of each tie of a model."""


def stored(model: Any) -> set[str]:
    """The names of what a file holds: parameters, and the buffers that are no scratch space."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return names | buffers - {name for name, _ in model.named_non_persistent_buffers()}


def pattern(model: Any) -> Pattern:
    """What a model ties, in the order of its modules; transformers' own choice is the kept name."""
    names, sources = stored(model), set(model.all_tied_weights_keys.values())
    found = []
    for group in tied.ties(model).groups:
        members = [name for name in group if name in names]
        if len(members) > 1:
            kept = next((name for name in members if name in sources), members[0])
            found.append((kept, tuple(name for name in members if name != kept)))
    return _modules(found)


def _modules(ties: list[tuple[str, tuple[str, ...]]]) -> Pattern:
    """Says once for a whole module what is tied in each of its tensors."""
    parts: dict[tuple[str, ...], list[str]] = {}
    for kept, others in ties:
        names = [name.split(".") for name in (kept, *others)]
        common = 0
        while all(name[-1 - common :] == names[0][-1 - common :] for name in names):
            common += 1
        heads = tuple(".".join(name[: len(name) - common]) for name in names)
        parts.setdefault(heads, []).append(".".join(names[0][len(names[0]) - common :]))
    said = []
    for (kept, *others), ends in parts.items():
        end = ends[0] if len(ends) == 1 else f"{_common(ends)}*"
        said.append((f"{kept}.{end}", tuple(f"{name}.{end}" for name in others)))
    return tuple(said)


def _common(names: list[str]) -> str:
    """The modules that all names begin with, and a dot."""
    alike = os.path.commonpath([name.replace(".", "/") for name in names])
    return alike.replace("/", ".") + "." * bool(alike)


def table() -> str:
    """The table: what is tied, and which architectures tie it."""
    rows: dict[Pattern, list[str]] = {}
    for name in architectures.BUILT:
        # Without a default tie it is a matter of the configuration: in italics.
        said = f"`{name}`" if architectures.tied_by_default(name) else f"*`{name}`*"
        rows.setdefault(pattern(architectures.build(name)), []).append(said)
    lines = ["| kept | also named | architectures |", "|---|---|---|"]
    for ties, names in sorted(rows.items(), key=lambda row: (not row[0], -len(row[1]), row[0])):
        kept = "<br>".join(f"`{source}`" for source, _ in ties) or NOTHING
        others = "<br>".join(", ".join(f"`{name}`" for name in names) for _, names in ties)
        plain = [name.strip("*") for name in names] if not ties else names
        lines.append(f"| {kept} | {others} | {', '.join(plain)} |")
    total = sum(bool(ties) * len(names) for ties, names in rows.items())
    default = sum(not n.startswith("*") for ties, names in rows.items() if ties for n in names)
    lines += [
        "",
        f"{len(architectures.BUILT)} architectures of transformers {transformers.__version__}, "
        f"{total} of them with ties; {default} tie by default.",
    ]
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with a new table between the marks."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    PAGE.write_text(page(PAGE.read_text()))
