"""Runs the benchmarks and prints one table.

python -m benchmarks              all of them
python -m benchmarks find copy    some
"""

import argparse
import importlib
import os
import platform
import sys
import time

from benchmarks.measure import Row, table

GROUPS = {
    "import": "what `import tied` adds to `import numpy`",
    "split": "split and merge, against Flax NNX, Equinox and jax.tree",
    "step": "one call of a jitted step on the storages",
    "torch": "casts and copies, against torch.nn.Module and deepcopy",
    "tie": "a module with a lasting tie, against the same written by hand",
    "find": "finding ties, against safetensors and accelerate",
    "copy": "a copy of 1 GiB, every second array a tie",
    "files": "files of 2 GiB, against safetensors",
    "discover": "lost ties of 512 MiB, against reading them once",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"one of: {', '.join(GROUPS)}; default all")
    names = parser.parse_args().name or list(GROUPS)
    if unknown := [name for name in names if name not in GROUPS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    start = time.perf_counter()
    rows: list[Row] = []
    for name in names:
        print(f"{name}: {GROUPS[name]} ...", file=sys.stderr, flush=True)
        rows += importlib.import_module(f"benchmarks.{name}_").rows()
    print(table(rows))
    print(
        f"\nmedians; {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{time.perf_counter() - start:.0f} s in all"
    )


if __name__ == "__main__":
    main()
