"""Thousands of files that were sound and are changed at random: refused, or read within bounds."""

from __future__ import annotations

import importlib
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from mutations import inside, judge, mutated, seeds
from tied._checkpoint import open_checkpoint

FUZZ = Path(__file__).parents[1] / "fuzz"
ROUNDS = 1500


@pytest.mark.parametrize("number", range(4))
def test_changed_files_are_refused_or_read_within_bounds(number: int, tmp_path: Path) -> None:
    numbers, path = random.Random(number), tmp_path / "x.safetensors"
    sound, found = seeds(), Counter[bool]()
    for turn in range(ROUNDS):
        content = mutated(numbers.choice(sound), numbers)
        path.write_bytes(content)
        try:
            found[judge(path)] += 1
        except BaseException:
            print(f"seed {number}, turn {turn}:", content)
            raise
    assert found[True] > ROUNDS // 50  # a reader that refuses everything would pass
    assert found[False] > ROUNDS // 2


def test_the_files_that_are_changed_are_sound(tmp_path: Path) -> None:
    for content in seeds():
        (tmp_path / "x.safetensors").write_bytes(content)
        assert judge(tmp_path / "x.safetensors")


def test_the_corpus_is_up_to_date() -> None:
    """`make fuzz` begins with these; after a change: python fuzz/read_files.py --corpus"""
    corpus = {file.name: file.read_bytes() for file in (FUZZ / "corpus").iterdir()}
    assert corpus == {f"{n}.safetensors": content for n, content in enumerate(seeds())}


def test_make_fuzz_can_be_run_on_one_file(tmp_path: Path) -> None:
    """The target itself, without the library that drives it."""
    sys.path.insert(0, str(FUZZ))
    try:
        target = importlib.import_module("read_files")
    finally:
        sys.path.remove(str(FUZZ))
    for content in (b"", *seeds()):
        target.one(content)


def test_the_judge_sees_a_storage_that_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(seeds()[0])
    contents = open_checkpoint(path)
    inside(contents, path.stat().st_size)
    with pytest.raises(AssertionError):
        inside(contents, path.stat().st_size - 1)
