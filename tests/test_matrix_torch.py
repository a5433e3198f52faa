"""The survival matrix for PyTorch: after `tied.tie` every tie is kept, or refused by name.

Each cell is run twice, in PyTorch by itself and after `tied.tie`, and both ends are those of
docs/matrix.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

import kinds
import matrix_page
import tied
import torch_cells
import torch_judge
from kinds import KINDS
from torch_cells import DDP, DTYPES, EXEMPT, NAMES, NEVER, PARTS_ONLY, SPAWN, Outcome
from torch_operations import OPS, compiled, prepared, process_group, separate, spawned

WRITTEN = matrix_page.parse(matrix_page.PAGE.read_text(encoding="utf-8"))


def check(name: str, op: str, pair: tuple[Outcome, Outcome]) -> None:
    alone, after = pair
    assert (alone.verdict, after.verdict) == WRITTEN[name, op], (alone.error, after.error)
    exempt = torch_cells.exempt(name, op)
    if exempt is None:
        assert after.verdict in ("kept", NEVER), after.error
        if after.stored is not None:
            assert after.stored == held(name)
        return
    assert after.verdict == exempt.verdict
    if exempt.verdict == "refused":
        assert type(after.error) is exempt.error
        assert str(after.error) == exempt.text.format(dtype=DTYPES[op])
        assert after.error.paths == KINDS[name].paths
    else:
        assert isinstance(after.error, exempt.error)
        assert exempt.text in str(after.error)


def held(name: str) -> int:
    """The bytes of memory that the two members read together."""
    both = kinds.pattern(torch_judge.build(name).both(), "bytes")
    return len({byte for member in both for byte in member})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", [op for op in OPS if op != DDP])
def test_cell(op: str, name: str) -> None:
    check(name, op, torch_cells.pair(name, op))


def test_spawned_processes() -> None:
    with spawned() as child:
        for name in NAMES:
            check(name, SPAWN, torch_cells.pair(name, SPAWN, child))


def test_data_parallel() -> None:
    with process_group():
        for name in NAMES:
            check(name, DDP, torch_cells.pair(name, DDP))


@pytest.mark.parametrize("name", NAMES)
def test_tie_makes_every_tie_last_and_no_other(name: str) -> None:
    model = torch_judge.build(name)
    before = tied.ties(model)
    adoption = tied.tie(model)
    assert bool(adoption.made) is (KINDS[name].tied)
    assert adoption.left == ()
    assert not tied.compare(before, model)


@pytest.mark.parametrize("name", [*PARTS_ONLY.split(), "partial_overlap"])
def test_a_part_of_the_memory_can_be_loaded(name: str) -> None:
    """The way out that the page names for a checkpoint with the second name alone."""
    model, given = prepared(name, True), separate(name)["second"] * 2
    found = model.load_state_dict({"second": given}, strict=False)
    assert found.missing_keys == ["tied_span" if name == "partial_overlap" else "first"]
    assert found.unexpected_keys == []
    assert torch.equal(model.second, given)
    assert torch_judge.judge_module(model, name, None) == "kept"


def test_compile_with_inductor() -> None:
    with torch_cells.quiet():
        program = compiled(prepared("transpose", True), "transpose", "inductor")
    memory = torch_judge.descended("transpose")
    assert torch_judge.judge_program(program, "transpose", memory) == "kept"


def test_the_page_is_what_the_tool_writes() -> None:
    assert matrix_page.render(WRITTEN) == matrix_page.PAGE.read_text(encoding="utf-8")
    assert set(WRITTEN) == {(name, op) for name in NAMES for op in (*OPS, SPAWN)}


def test_every_exemption_is_a_cell() -> None:
    cells = [cell for exempt in EXEMPT for cell in exempt.cells()]
    assert len(cells) == len(set(cells))
    assert set(cells) <= set(WRITTEN)


def test_interleaved_columns_can_be_saved_after_a_copy(tmp_path: Path) -> None:
    """The way out that the page names."""
    model = tied.copy(prepared("no_tie_interleaved_columns", True))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[key], x) for key, x in model.state_dict().items())
