"""Ties that only the values remember, as the commands look for them and print them."""

from __future__ import annotations

from typing import Any

from tied._cli.progress import Progress
from tied._discover import Discovered, Finding, discover
from tied._files.contents import Checkpoint
from tied._ties import said_bytes


def find(contents: Checkpoint) -> Discovered:
    """Returns what the values of a checkpoint remember; shows a bar."""
    with Progress("discovering", 0) as progress:
        return discover(contents, progress=progress.reach)


def found_facts(found: Discovered) -> list[tuple[str, str]]:
    """Returns what to print of that."""
    if not found.findings:
        return [("found", "no array has the values of another one")]
    facts = [
        ("found", f"{x.name} = {x.how}  ({x.kind}, {said_bytes(x.nbytes)} twice)")
        for x in found.findings
    ]
    return [*facts, ("twice", said_bytes(found.nbytes))]


def found_dict(found: Discovered | None) -> list[dict[str, Any]] | None:
    """Returns it as plain data."""
    return None if found is None else [_finding_dict(x) for x in found.findings]


def _finding_dict(found: Finding) -> dict[str, Any]:
    layout = found.layout
    return {
        "name": found.name,
        "of": found.of,
        "reads": found.how,
        "kind": found.kind,
        "shape": list(found.shape),
        "strides": list(layout.strides),
        "offset": layout.offset,
        "nbytes": found.nbytes,
    }
