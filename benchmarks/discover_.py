"""Lost ties in a file of 512 MiB, against reading the file once and adding it up.

Both sides open and map the file anew; it is in the page cache. The time of `discover` is that of
its samples, some hundred elements of an array, and of comparing what is equal: it grows with that.
"""

import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import tied
from benchmarks.measure import Row, race

MIB = 2**20
Arrays = dict[str, np.ndarray]
RNG = np.random.default_rng(0)


def random(*shape: int, dtype: str) -> np.ndarray:
    return np.frombuffer(RNG.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(
        shape
    )


def transformer(layers: int, width: int, words: int, dtype: str) -> Arrays:
    """The matrices of a transformer whose head was the transpose of its embedding."""
    model = {}
    for i in range(layers):
        for name in "qkvo":
            model[f"{i}.{name}"] = random(width, width, dtype=dtype)
        model[f"{i}.up"] = random(4 * width, width, dtype=dtype)
        model[f"{i}.down"] = random(width, 4 * width, dtype=dtype)
    model["embed"] = random(words, width, dtype=dtype)
    model["head"] = np.ascontiguousarray(model["embed"].T)
    return model


def doubled(copy: Callable[[np.ndarray], np.ndarray]) -> Arrays:
    """256 MiB of arrays, each of which is there twice."""
    arrays = {f"{i}": random(2048, 2048, dtype="float32") for i in range(16)}
    return arrays | {f"{name}.copy": copy(x) for name, x in arrays.items()}


def changed(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.view(np.uint32)[1500, 7] ^= 1
    return x


def read_and_sum(path: Path) -> int:
    mapped = np.memmap(path, np.uint8, "r")
    words = mapped[: mapped.size // 8 * 8].view(np.uint64)
    pieces = (words[i : i + 65536] for i in range(0, words.size, 65536))
    return sum(int(np.add.reduce(piece)) for piece in pieces)


def allocated(path: Path) -> float:
    tracemalloc.start()
    try:
        tied.discover(path)
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


# Not ru_maxrss: a process has that of its parent to start with.
RESIDENT = """
import re, sys, numpy, tied
def peak():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s*(\\d+) kB", status.read())[1]) / 1024
tied.discover({"a": numpy.arange(9), "b": numpy.arange(9)})
before = peak()
tied.discover(sys.argv[1])
print(peak() - before)
"""


def resident(path: Path) -> float:
    """What the process has in memory at most, the mapped pages of the file too."""
    command = [sys.executable, "-c", RESIDENT, str(path)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


CASES: dict[str, tuple[Callable[[], Arrays], int, float | None]] = {
    "512 MiB f32, 1/8 a transpose": (lambda: transformer(8, 1024, 16384, "float32"), 1, 1.3),
    "576 MiB f16, 1/8 a transpose": (lambda: transformer(8, 1536, 24576, "float16"), 1, 1.3),
    "512 MiB, all of it twice": (lambda: doubled(np.copy), 16, 1.3),
    "512 MiB, twice but for a bit": (lambda: doubled(changed), 0, None),
    "512 MiB, twice, transposed": (lambda: doubled(lambda x: np.ascontiguousarray(x.T)), 16, None),
}


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        for name, (make, count, target) in CASES.items():
            arrays = make()
            save_file(arrays, path)
            largest = sum(sorted(x.nbytes for x in arrays.values())[-2:]) / MIB
            del arrays
            assert len(tied.discover(path).findings) == count
            yield race(
                f"discover, {name} / reading and adding it up",
                lambda: tied.discover(path),
                lambda: read_and_sum(path),
                target=target,
                repeats=9,
            )
            if target is not None:
                yield Row("  allocated / the two largest", allocated(path), largest, 1.0, "MiB")
                yield Row("  resident / the two largest", resident(path), largest, 1.1, "MiB")
