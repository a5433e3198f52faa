"""Runs the tests that need a CUDA device; where there is none it says so, and fails."""

import os
import subprocess
import sys

# CUDA first, and the CPU beside it: models move between the two.
os.environ["JAX_PLATFORMS"] = ""


def cuda_devices() -> dict[str, int]:
    """The number of CUDA devices that each library sees."""
    import jax
    import torch

    return {
        "torch": torch.cuda.device_count(),
        "jax": sum(device.platform == "gpu" for device in jax.devices()),
    }


def main() -> int:
    """Returns the exit status of pytest, or 1 where nothing could be tested."""
    seen = cuda_devices()
    print("CUDA devices:", ", ".join(f"{library} sees {n}" for library, n in seen.items()))
    if not any(seen.values()):
        print("No GPU, so no test was run. CPU builds of the libraries see none: see CONTRIBUTING.")
        return 1
    os.environ["TIED_GPU_LIBRARIES"] = ",".join(library for library, n in seen.items() if n)
    return subprocess.call([sys.executable, "-m", "pytest", "-m", "gpu", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
