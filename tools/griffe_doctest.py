"""Shows the `>>>` examples of docstrings, which have no title, as code in the API page."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^>>> .*\n?)(?:^.+\n?)*", re.MULTILINE)


class Doctest(griffe.Extension):
    """Puts each example into a fence; it ends at an empty line, as it does for doctest."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of one function or class, before it is parsed."""
        if obj.docstring is not None:
            text = _EXAMPLE.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = text
