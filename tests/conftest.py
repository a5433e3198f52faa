"""Settings that must stand before an array library is imported."""

import os

# Eight JAX devices on the CPU, so that moves and shardings can be tested on any machine.
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
# `make gpu` sets the platforms itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Models here are so small that several threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
