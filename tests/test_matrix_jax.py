"""The survival matrix for JAX: after `tied` every tie is kept, or refused by name.

Each cell is run twice, in the framework by itself and after `tied.tie`, and both ends are those of
docs/matrix-jax.md.
"""

from __future__ import annotations

import pytest

import jax_cells
import jax_page
import tied
from jax_cells import EXEMPT, NEVER, OPS
from jax_hosts import HOSTS
from jax_kinds import KINDS

WRITTEN = jax_page.parse(jax_page.PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("host", "op"), OPS)
def test_cell(host: str, op: str, name: str) -> None:
    alone, after = jax_cells.pair(host, name, op)
    written = WRITTEN[host, name, op]
    assert (alone.verdict, after.verdict) == written, (alone.error, after.error)
    exempt = jax_cells.exempt((host, name, op))
    if exempt is None:
        assert after.verdict in ("kept", NEVER), after.error
        return
    assert after.verdict == exempt.verdict
    assert isinstance(after.error, exempt.error)
    assert exempt.text in str(after.error)
    if exempt.verdict == "refused":
        assert isinstance(after.error, tied.TieError)
        assert set(after.error.paths) >= {HOSTS[host].path(x) for x in KINDS[name].names[:2]}


def test_the_page_is_what_the_tool_writes() -> None:
    assert jax_page.render(WRITTEN) == jax_page.PAGE.read_text(encoding="utf-8")
    assert set(WRITTEN) == {(host, name, op) for host, op in OPS for name in KINDS}


def test_every_exemption_is_a_cell() -> None:
    cells = [cell for exempt in EXEMPT for cell in exempt.cells()]
    assert len(cells) == len(set(cells))
    assert set(cells) <= set(WRITTEN)
