"""The survival matrix for JAX: after `tied` every tie is kept, or refused by name.

Each cell is run twice, in the framework by itself and after `tied.tie`, and both ends are those of
docs/matrix-jax.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cells
import jax_judge
import jax_operations
import jax_page
import tied
from jax_cells import EXEMPT, NEVER, OPS
from jax_hosts import HOSTS
from jax_kinds import KINDS, normed

WRITTEN = jax_page.parse(jax_page.PAGE.read_text(encoding="utf-8"))
# What the frameworks say where they raise by themselves.
BY_ITSELF = {"jax": "Attempt to donate the same buffer twice", "nnx_tree": "Duplicate Param"}


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[None]:
    """JAX keeps what it compiled, some gigabytes; nobody else needs it."""
    yield
    jax.clear_caches()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("host", "op"), OPS)
def test_cell(host: str, op: str, name: str) -> None:
    alone, after = jax_cells.pair(host, name, op)
    written = WRITTEN[host, name, op]
    assert (alone.verdict, after.verdict) == written, (alone.error, after.error)
    if alone.verdict == "error":
        assert BY_ITSELF[host] in str(alone.error)
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


# --------------------------------------------------------------------------------- the judge


@pytest.mark.parametrize("host", HOSTS)
def test_the_judge_sees_what_is_wrong(host: str) -> None:
    there, kind = HOSTS[host], KINDS["transpose"]
    now, other = kind.memory(), kind.memory() * 2
    with there.setting():
        for adopt, values, word in ((True, now, "kept"), (True, other, "wrong"),
                                    (False, now, "lost")):  # fmt: skip
            model = there.tied("transpose") if adopt else there.plain("transpose")
            assert jax_judge.judge_tied(there, model, "transpose", values) == word
        assert jax_judge.judge_plain(there, there.plain("transpose"), kind, now) == "lost"
        model = there.plain("same_array")
        assert jax_judge.judge_plain(there, model, KINDS["same_array"], other) == "wrong"
        apart = KINDS["no_tie_equal_values"]
        assert jax_judge.judge_plain(there, model, apart, now) == "made"
        tied_one = there.adopt(model)
        assert jax_judge.judge_tied(there, tied_one, "no_tie_equal_values", now) == "made"


def tied_by(view: Any, name: str, memory: np.ndarray) -> Any:
    """The dict of a kind over this memory, whose second member reads another view of the first."""
    there, kind = HOSTS["jax"], KINDS[name]
    arrays = [jnp.array(x) for x in kind.read(memory)]
    return tied.tie(there.of(arrays, kind), "second.w", "first.w", view)


def test_the_judge_sees_another_view_of_the_same_values() -> None:
    """Where all elements are one number, only other contents tell what is read."""
    there, ones = HOSTS["jax"], np.ones((8, 4), np.float32)
    model = tied_by(lambda a: a[2:4], "row_slice", ones)
    assert jax_judge.judge_tied(there, model, "row_slice", ones) == "lost"
    model = tied_by(lambda a: a[1:3], "row_slice", ones)
    assert jax_judge.judge_tied(there, model, "row_slice", ones) == "kept"


def test_the_judge_sees_a_gradient_that_does_not_arrive() -> None:
    there, now = HOSTS["jax"], KINDS["computed"].memory()
    model = tied_by(lambda a: jax.lax.stop_gradient(normed(a)), "computed", now)
    assert jax_judge.judge_tied(there, model, "computed", now) == "wrong"


# -------------------------------------------------------------- the ways out that the page names


def test_two_arrays_over_one_buffer_can_be_donated_after_dedup() -> None:
    model = HOSTS["jax"].tied("no_tie_one_buffer")
    with pytest.raises(tied.TieError, match=r"first\.w") as caught:
        tied.check_donation((model,))
    assert {path.partition(".")[2] for path in caught.value.paths} == {"first.w", "second.w"}
    (model,) = tied.check_donation((model,), dedup=True)
    after = jax_operations.donating(model)
    assert jax_judge.judge_tied(
        HOSTS["jax"], after, "no_tie_one_buffer", 2 * KINDS["no_tie_one_buffer"].memory()
    ) == "kept"  # fmt: skip


def test_tree_at_takes_the_storages_by_name() -> None:
    there, now = HOSTS["equinox"], KINDS["transpose"].memory()
    model = there.tied("transpose")
    after = eqx.tree_at(lambda m: m.storages["first.w"], model, jnp.array(now * 2))
    assert jax_judge.judge_tied(there, after, "transpose", now * 2) == "kept"
    after = model.set("second.w", jnp.array(now.T * 2))
    assert jax_judge.judge_tied(there, after, "transpose", now * 2) == "kept"
