"""The page that draws a checkpoint: one file of HTML that needs nothing else, and no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files

from tied._cli.page_data import page_data
from tied._cli.printing import clean, counted
from tied._cli.show import Kept
from tied._cli.tree import branches, total
from tied._discover import Discovered
from tied._files.contents import Checkpoint
from tied._ties import said_bytes

_SCRIPTS = ("model.js", "search.js", "links.js", "map.js", "panel.js", "tree.js", "start.js")
_MOST_NAMES = 4
_MOST_LETTERS = 120


def render(contents: Checkpoint, discovered: Discovered | None = None) -> str:
    """Returns a page that draws a checkpoint; the same checkpoint gives the same page.

    Args:
        contents: The checkpoint. No tensor of it is read.
        discovered: Ties that only its values remember, to be drawn apart from those that it has.
    """
    kept = Kept.of(contents)
    script = "(() => {\n'use strict';\n" + "\n".join(map(_asset, _SCRIPTS)) + "})();\n"
    style = _asset("page.css")
    name = html.escape(_short(clean(contents.path.name or str(contents.path))))
    return _fill(
        _asset("page.html"),
        {
            "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
                      "base-uri 'none'; form-action 'none'",
            "name": name,
            "about": html.escape(_about(contents, kept)),
            "facts": "\n".join(_facts(contents, kept, discovered)),
            "style": style,
            "script": script,
            "data": _json(page_data(contents, kept, discovered)),
        },
    )  # fmt: skip


def _asset(name: str) -> str:
    return files("tied._cli").joinpath("web", name).read_text(encoding="utf-8")


def _fill(template: str, parts: dict[str, str]) -> str:
    """Returns a template with its parts; what looks like a place in a part is none."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _hash(text: str) -> str:
    """Returns the only inline text that a browser is to accept, so that no name can add another."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _json(value: object) -> str:
    """Returns JSON that can't end the element that it is in, in ASCII."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _short(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def _about(contents: Checkpoint, kept: Kept) -> str:
    parts = [contents.format]
    if contents.files:
        parts.append(counted(len(contents.files), "file"))
    if kept.nbytes:
        parts.append(said_bytes(kept.nbytes))
    return " · ".join(parts)


def _facts(contents: Checkpoint, kept: Kept, found: Discovered | None) -> list[str]:
    """Returns the summary, as members of a list of terms."""
    sums = total(branches(contents))
    names = sum(1 for _ in contents.names())
    facts = [
        _fact("Parameters", f"{sums.parameters:,}",
              "each storage counted once" if sums.parameters == sums.naive_parameters
              else f"{sums.naive_parameters:,} if every name counts"),
        _fact("Bytes stored", said_bytes(kept.stored or contents.nbytes),
              f"{said_bytes(contents.nbytes)} of them unique"
              if kept.stored > contents.nbytes
              else f"in {counted(len(contents.storages), 'storage')}"),
        _fact("If every name were written", said_bytes(sums.naive_nbytes),
              counted(names, "name")),
    ]  # fmt: skip
    if contents.format == "safetensors":
        many = len(kept.missed)
        facts.append(
            _fact("A loader that knows no ties", f"misses {counted(many, 'name')}" if many
                  else "misses nothing", _listed(kept.missed), "tie" if many else "")
        )  # fmt: skip
    if found is not None:
        many = len(found.findings)
        facts.append(
            _fact("Lost ties", f"{many:,}" if many else "none",
                  f"{said_bytes(found.nbytes)} stored twice" if many
                  else "no array has the values of another one", "lost" if many else "")
        )  # fmt: skip
    return facts


def _listed(names: list[str]) -> str:
    shown = ", ".join(_short(clean(name)) for name in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more:,} more" if more > 0 else shown or "every name has its tensor"


def _fact(term: str, value: str, more: str, style: str = "") -> str:
    mark = f' class="{style}"' if style else ""
    return (
        f"<div{mark}><dt>{html.escape(term)}</dt><dd><b>{html.escape(value)}</b>"
        f" <span>{html.escape(more)}</span></dd></div>"
    )
