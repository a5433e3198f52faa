"""Saves that are killed, interrupted or out of room at every point; run as a program.

A process without threads forks one child for each point. The points are the lines of the code that
writes: more than its system calls, and the file's own buffers are lost with the process.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tied

SIZE = 40
ENDS = ("_files/atomic.py", "_files/write.py", "_files/container.py")
OFTEN = 3  # a line counts so often: once for each of the files, not for each tensor of a header


def model(value: float, size: int = SIZE) -> dict[str, Any]:
    """Two storages of a size, with ties; every number in it says which checkpoint it is."""
    w = np.full((size, 4), value, np.float32)
    v = np.full((4, size), value, np.float32)
    return {"w": w, "t": w.T, "row": w[1], "v": v, "half": v[1:3]}


SHARD = SIZE * 4 * 4
HOW: dict[str, tuple[str, dict[str, Any]]] = {
    "file": ("model.safetensors", {}),
    "folder": (".", {}),
    "shards": (".", {"max_shard_bytes": SHARD}),
    "expanded": (".", {"max_shard_bytes": SHARD, "expand": True}),
}
SCENARIOS = {
    "nothing then file": (None, "file"),
    "file then file": ("file", "file"),
    "nothing then shards": (None, "shards"),
    "shards then shards": ("shards", "shards"),
    "shards then folder": ("shards", "folder"),
    "folder then shards": ("folder", "shards"),
    "shards then expanded": ("shards", "expanded"),
}


def save(how: str, folder: Path, value: float) -> None:
    name, options = HOW[how]
    tied.save(model(value), folder / name, **options)


def state(folder: Path, values: tuple[float, ...]) -> float | None:
    """Which checkpoint the folder leads to, whole and tied; None if it leads to none."""
    try:
        loaded = tied.load(folder)
    except tied.FileError:
        return None
    expected = model(float(loaded["w"][0, 0]))
    assert sorted(loaded) == sorted(expected), (os.listdir(folder), list(loaded))
    for name, array in expected.items():
        assert np.array_equal(loaded[name], array), name
    assert not tied.compare(expected, loaded)
    assert float(loaded["w"][0, 0]) in values
    return float(loaded["w"][0, 0])


def clear(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def forked(child: Callable[[], int]) -> int:
    """The exit status of a child."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = child()
        finally:
            if status == 1:
                traceback.print_exc()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at_point(number: int, act: Callable[[], None]) -> None:
    """Does something at the number-th line of the code that writes, from now on."""
    count = 0
    seen: Counter[tuple[str, int]] = Counter()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(ENDS):
            return None
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and seen[line] < OFTEN:
            seen[line] += 1
            count += 1
            if count == number:
                sys.settrace(None)
                act()
        return trace

    sys.settrace(trace)


def killed(scenario: str, folder: Path) -> dict[str, int]:
    """Kills a save at each point; returns how often the old and the new checkpoint were there."""
    before, after = SCENARIOS[scenario]
    found = {"points": 0, "old": 0, "new": 0}
    while True:
        clear(folder)
        if before is not None:
            save(before, folder, 1)

        def child() -> int:
            at_point(found["points"] + 1, lambda: os._exit(9))
            save(after, folder, 2)
            sys.settrace(None)
            return 0

        status = forked(child)
        assert status in (0, 9), status
        there = state(folder, (1, 2))
        assert there is not None or before is None, (found, os.listdir(folder))
        if status == 0:
            assert there == 2
            return found
        found["points"] += 1
        found["new" if there == 2 else "old"] += 1
        again(after, folder)


def again(how: str, folder: Path) -> None:
    """A later save works, and leaves nothing but its own files."""
    save(how, folder, 3)
    assert state(folder, (3,)) == 3
    left = sorted(file.name for file in folder.iterdir())
    if how in ("file", "folder"):
        assert left == ["model.safetensors"], left
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = {*index["weight_map"].values()}
        assert left == sorted([*files, "model.safetensors.index.json"]), left


class Stop(KeyboardInterrupt):
    """Ctrl-C."""


def interrupted(scenario: str, folder: Path) -> dict[str, int]:
    """Raises KeyboardInterrupt at each point; nothing half-written is left, then or later."""
    before, after = SCENARIOS[scenario]
    found = {"points": 0, "old": 0, "new": 0}
    while True:
        clear(folder)
        if before is not None:
            save(before, folder, 1)
        files = {file.name for file in folder.iterdir()}
        at_point(found["points"] + 1, stop)
        try:
            save(after, folder, 2)
        except Stop:
            pass
        else:
            return found
        finally:
            sys.settrace(None)
        there = state(folder, (1, 2))
        assert there is not None or before is None, found
        left = {file.name for file in folder.iterdir()}
        assert there == 2 or left == files, (found, left)
        assert not [name for name in left if name.endswith(".part")], left
        found["points"] += 1
        found["new" if there == 2 else "old"] += 1
        again(after, folder)


def stop() -> None:
    raise Stop


def random_times(scenario: str, folder: Path) -> dict[str, int]:
    """SIGKILL from outside while megabytes are written, with real fsyncs."""
    numbers = random.Random(0)
    size = 1 << 18
    after = SCENARIOS[scenario][1]
    options = {**HOW[after][1], **({"max_shard_bytes": 1} if after == "shards" else {})}
    path = folder / HOW[after][0]
    found = {"points": 0, "old": 0, "new": 0}
    tied.save(model(1, size), path, **options)
    start = time.perf_counter()
    tied.save(model(1, size), path, **options)
    took = time.perf_counter() - start
    for number in range(2, 14):
        pid = os.fork()
        if pid == 0:
            tied.save(model(number, size), path, **options)
            os._exit(0)
        time.sleep(numbers.random() * took * 1.3)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        loaded = tied.load(path)
        values = {float(x) for array in loaded.values() for x in (array.min(), array.max())}
        assert len(values) == 1, values
        assert not tied.compare(model(0, size), loaded)
        found["points"] += 1
        found["new" if values == {number} else "old"] += 1
        if values != {number}:
            assert values == {found.get("last", 1)}, values
        found["last"] = int(values.pop())
    tied.save(model(99, size), path, **options)
    assert float(tied.load(path)["w"][0, 0]) == 99
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]
    return found


def out_of_room(scenario: str, folder: Path) -> dict[str, int]:
    """A limit on the bytes of a file, from none to all: the old checkpoint stays, nothing else."""
    before, after = SCENARIOS[scenario]
    found = {"points": 0, "old": 0, "new": 0}
    assert before is not None
    for limit in (*range(0, 2 * SIZE * 16 + 900, 97), 1 << 20):
        clear(folder)
        save(before, folder, 1)
        files = {file.name: file.read_bytes() for file in folder.iterdir()}

        status = forked(partial(limited, limit, after, folder))
        found["points"] += 1
        if status == 0:
            assert state(folder, (2,)) == 2
            found["new"] += 1
            continue
        assert status == 3, (limit, status)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
        found["old"] += 1
    return found


def limited(limit: int, how: str, folder: Path) -> int:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        save(how, folder, 2)
    except tied.FileError as error:
        return 3 if error.message == "the file can't be written" else 4
    return 0


WHAT = {"killed": killed, "interrupted": interrupted, "random_times": random_times,
        "out_of_room": out_of_room}  # fmt: skip


def main() -> None:
    what, scenario, folder = sys.argv[1:]
    if what != "random_times":
        os.fsync = lambda handle: None  # its order is another test's; it takes the time
    print(json.dumps(WHAT[what](scenario, Path(folder))))


if __name__ == "__main__":
    main()
