"""What `import tied` adds to `import numpy`, each measured in interpreters of their own."""

import statistics
import subprocess
import sys
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


def run() -> tuple[float, float]:
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    tied_ms, numpy_ms = map(float, done.stdout.split())
    return tied_ms, numpy_ms


def rows() -> Iterator[Row]:
    run()
    times = [run() for _ in range(15)]
    ours, numpy = (statistics.median(side) for side in zip(*times, strict=True))
    yield Row("import tied, after numpy / import numpy", ours, numpy, 30, figure="extra")
