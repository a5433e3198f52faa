"""Files of 2 GiB, against safetensors' own functions; what is in memory at most, beside each.

`TIED_BENCH_MIB` gives another number of MiB, `TIED_BENCH_FOLDER` another disk. `tied.save` waits
until the bytes are on the disk and `save_file` does not: they are compared with and without the
waiting. `load_file` of PyTorch maps the file, that of NumPy copies it: each of our two ways is
compared with what does the same.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file as numpy_load
from safetensors.numpy import save_file as numpy_save
from safetensors.torch import load_file as torch_load
from safetensors.torch import save_file as torch_save

import tied
from benchmarks.measure import Row, race

MIB = 2**20
SIZE = int(os.environ.get("TIED_BENCH_MIB", "2048"))
FOLDER = os.environ.get("TIED_BENCH_FOLDER")
MATRICES = 32
NAMES = 100_000


class Given(NamedTuple):
    """What a case works on: a file, and the same matrices in each library."""

    path: Path
    arrays: dict[str, np.ndarray]
    tensors: dict[str, torch.Tensor]
    ties: dict[str, np.ndarray]


def given(path: Path, mib: int) -> Given:
    rows = mib * MIB // MATRICES // 4096
    arrays = {f"{i}.w": np.full((rows, 1024), i, np.float32) for i in range(MATRICES)}
    tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    return Given(path, arrays, tensors, arrays | {f"{k}.T": x.T for k, x in arrays.items()})


def synced(save: Callable[..., Any], model: Any, path: Path) -> None:
    """Saves, and waits until the file and its name are on the disk."""
    save(model, path)
    for place in (path, path.parent):
        handle = os.open(place, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def unsynced(model: Any, path: Path) -> None:
    """Our `save` without the waiting."""
    fsync = os.fsync
    os.fsync = lambda handle: None  # type: ignore[assignment]
    try:
        tied.save(model, path)
    finally:
        os.fsync = fsync


def added(arrays: dict[str, Any]) -> list[Any]:
    return [x.sum() for x in arrays.values()]


@dataclass(frozen=True)
class Case:
    name: str
    ours: Callable[[Given], Any]
    theirs: Callable[[Given], Any]
    target: float | None = None


SAVES = [
    Case(
        "save, numpy / save_file, synced",
        lambda g: tied.save(g.arrays, g.path),
        lambda g: synced(numpy_save, g.arrays, g.path),
        1.05,
    ),
    Case(
        "save, torch / save_file, synced",
        lambda g: tied.save(g.tensors, g.path),
        lambda g: synced(torch_save, g.tensors, g.path),
        1.05,
    ),
    Case(
        "save, torch, not synced / save_file",
        lambda g: unsynced(g.tensors, g.path),
        lambda g: torch_save(g.tensors, g.path),
        1.05,
    ),
    Case(
        "save, numpy, each with its transpose / save_file of the unique, synced",
        lambda g: tied.save(g.ties, g.path),
        lambda g: synced(numpy_save, g.arrays, g.path),
        1.05,
    ),
]
LOADS = [
    Case(
        "load, numpy, not mapped / load_file",
        lambda g: tied.load(g.path, mapped=False),
        lambda g: numpy_load(g.path),
        1.05,
    ),
    Case(
        "load, torch, not mapped / load_file and a clone of each",
        lambda g: tied.load(g.path, framework="torch", mapped=False),
        lambda g: {name: x.clone() for name, x in torch_load(g.path).items()},
        1.05,
    ),
    Case(
        "load, torch, mapped, all added up / load_file, all added up",
        lambda g: added(tied.load(g.path, framework="torch")),
        lambda g: added(torch_load(g.path)),
        1.1,
    ),
    Case(
        "load, numpy, mapped, all added up / load_file, all added up",
        lambda g: added(tied.load(g.path)),
        lambda g: added(numpy_load(g.path)),
        1.1,
    ),
    Case(
        "load, torch, mapped, nothing read / load_file, nothing read",
        lambda g: tied.load(g.path, framework="torch"),
        lambda g: torch_load(g.path),
    ),
]

# Not ru_maxrss: a process has that of its parent to start with.
PEAK = """
import re, sys
from pathlib import Path
from benchmarks import files_
def peak():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s*(\\d+) kB", status.read())[1]) / 1024
path, cases, number, side = Path(sys.argv[1]), *sys.argv[2:]
call = getattr(getattr(files_, cases)[int(number)], side)
warm = files_.given(path.with_name("warm.safetensors"), 1)
files_.tied.save(warm.arrays, warm.path)
call(warm)
given = files_.given(path, files_.SIZE if cases == "SAVES" else 0)
before = peak()
kept = call(given)
print(peak() - before)
"""


def peak(path: Path, *which: str) -> float:
    """MiB that a process takes for one side of a case, mapped pages of the file among them."""
    command = [sys.executable, "-c", PEAK, str(path), *which]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compared(cases: str, g: Given) -> Iterator[Row]:
    """For each case the times and the memory."""
    for number, case in enumerate(globals()[cases]):
        yield race(
            case.name, partial(case.ours, g), partial(case.theirs, g), target=case.target, repeats=7
        )
        ours, theirs = (peak(g.path, cases, str(number), side) for side in ("ours", "theirs"))
        yield Row("  in memory at most, besides the model", ours, theirs, unit="MiB", figure="MiB")


READ = """
import sys, safetensors
with safetensors.safe_open(sys.argv[1], "numpy") as file:
    print(*[(name, file.get_slice(name).get_shape()) for name in file.keys()])
"""


def shown(path: Path) -> Row:
    """`tied show` of very many names, as a command: with the start of Python."""
    many: dict[str, Any] = {}
    for n in range(NAMES // 2):
        many[f"layers.{n}.w"] = w = np.ones((2, 2), np.float32)
        many[f"layers.{n}.t"] = w.T
    tied.save(many, path)
    show = [sys.executable, "-m", "tied", "show", str(path)]
    read = [sys.executable, "-c", READ, str(path)]
    return race(
        f"tied show, {NAMES:,} names, half of them ties / names and shapes by safe_open",
        lambda: subprocess.run(show, check=True, capture_output=True),
        lambda: subprocess.run(read, check=True, capture_output=True),
        repeats=5,
    )


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        path = Path(folder, "model.safetensors")
        yield from compared("SAVES", given(path, SIZE))
        yield from compared("LOADS", given(path, 0))
        yield shown(path)
