"""A save that is killed, interrupted or out of room leaves the old checkpoint or the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import killed_saves
import tied
from killed_saves import SCENARIOS
from tied._files.contents import Checkpoint, Stored
from tied._files.write import write

OVER = [name for name, (before, _) in SCENARIOS.items() if before is not None]


def run(what: str, scenario: str, folder: Path) -> dict[str, int]:
    command = [sys.executable, killed_saves.__file__, what, scenario, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_line_leaves_the_old_or_the_new(scenario: str, tmp_path: Path) -> None:
    """At each line of the writer; a later save works and removes what the dead one left."""
    found = run("killed", scenario, tmp_path)
    assert found["points"] > 50
    assert found["old"] > 40
    assert found["new"] > 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_interrupt_at_any_line_leaves_nothing_half_written(
    scenario: str, tmp_path: Path
) -> None:
    found = run("interrupted", scenario, tmp_path)
    assert found["points"] > 50
    assert found["old"] > 40
    assert found["new"] > 1


@pytest.mark.parametrize("scenario", ["file then file", "shards then shards"])
def test_a_kill_at_any_time_leaves_the_old_or_the_new(scenario: str, tmp_path: Path) -> None:
    found = run("random_times", scenario, tmp_path)
    assert found["points"] == 12


@pytest.mark.parametrize("scenario", OVER)
def test_a_full_disk_leaves_the_old(scenario: str, tmp_path: Path) -> None:
    found = run("out_of_room", scenario, tmp_path)
    assert found["old"] > 5
    assert found["new"] > 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """The calls that make a save durable, in order: what is done to which file, and its bytes."""
    seen: list[tuple[str, str, Any]] = []
    fsync, replace = os.fsync, os.replace

    def name(path: Any) -> str:
        text = Path(path).name
        return ".part" if text.endswith(".part") else text

    def on_fsync(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        seen.append(("fsync", name(path), os.fstat(handle).st_size))
        fsync(handle)

    def on_replace(source: Any, target: Any) -> None:
        seen.append(("replace", name(source), name(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", on_fsync)
    monkeypatch.setattr(os, "replace", on_replace)
    return seen


def test_the_bytes_are_on_the_disk_before_the_name_is(calls: Any, tmp_path: Path) -> None:
    path = tied.save({"w": np.ones(1000)}, tmp_path / "x.safetensors")
    assert calls[:2] == [
        ("fsync", ".part", path.stat().st_size), ("replace", ".part", "x.safetensors")
    ]  # fmt: skip
    assert [call[:2] for call in calls[2:]] == [("fsync", tmp_path.name)]


def test_the_index_is_written_when_all_files_are_on_the_disk(calls: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    index = tied.save({"v": np.ones(100), "w": np.ones(100)}, folder, max_shard_bytes=800)
    order = [call[2] if call[0] == "replace" else call[1] for call in calls]
    first, second = sorted(file.name for file in folder.glob("*.safetensors"))
    one = [".part", first, "model", ".part", second, "model", ".part", index.name, "model"]
    assert order[: len(one)] == one
    assert {call[:2] for call in calls[len(one) :]} <= {("fsync", "model")}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(tied.FileError) as caught:
        tied.save({"w": np.ones(3)}, tmp_path / "no" / "x.safetensors")
    assert str(caught.value) == (
        "the file can't be written\n"
        f"  file  {tmp_path}/no/x.safetensors\n  why   No such file or directory"
    )


def test_a_failing_array_leaves_the_old_file(tmp_path: Path) -> None:
    """The second storage can't be read when its turn comes."""

    def breaks() -> Any:
        raise MemoryError("no more")

    path = tied.save({"w": np.zeros(3, np.uint8)}, tmp_path / "x.safetensors")
    before = path.read_bytes()
    stored = {
        "a": Stored("a", "U8", (4,), 4, lambda: np.zeros(4, np.uint8)),
        "b": Stored("b", "U8", (4,), 4, breaks),
    }
    with pytest.raises(MemoryError):
        write(Checkpoint(path, "model", stored), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_two_writers_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """A save removes what dead writers left, not what one is writing."""
    path = tmp_path / "x.safetensors"
    code = (
        "import sys, numpy as np, tied\n"
        "for n in range(30): tied.save({'w': np.full(5000, float(sys.argv[2]))}, sys.argv[1])\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)]) for n in (1, 2)]
    try:
        assert [writer.wait(120) for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert set(tied.load(path)["w"].tolist()) in ({1.0}, {2.0})
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
