"""Objects with state of their own that holds no parameters: random generators and their kind."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from tied._node import Node, Opened


class WholeNode(Node):
    """Kept as it is by `map`; `copy` gives the copy a twin of its own."""

    def open(self, x: Any) -> Opened:
        return (), [], x

    def build(self, cls: type, keys: Sequence[Any], values: list[Any], static: Any) -> Any:
        return copy.deepcopy(static)


WHOLE = WholeNode()
