"""What `import tied` adds to `import numpy`, in fresh interpreters that find compiled bytecode."""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.measure import Row

CODE = """
import time
start = time.perf_counter()
import numpy
middle = time.perf_counter()
import tied
print((time.perf_counter() - middle) * 1e3, (middle - start) * 1e3)
"""


def run(cache: str) -> tuple[float, float]:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    tied_ms, numpy_ms = map(float, done.stdout.split())
    return tied_ms, numpy_ms


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as cache:
        run(cache)  # compiles
        times = [run(cache) for _ in range(15)]
    ours, numpy = (statistics.median(side) for side in zip(*times, strict=True))
    yield Row("import tied, after numpy / import numpy", ours, numpy, 30, figure="extra")
