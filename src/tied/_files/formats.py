"""The formats of checkpoints, and how each is opened. To add one, add it to `_BY_SUFFIX`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tied._errors import FileError
from tied._files.contents import Checkpoint
from tied._files.flax import open_msgpack
from tied._files.gguf import open_gguf
from tied._files.npz import open_npy, open_npz
from tied._files.onnx import open_onnx
from tied._files.orbax import open_orbax, orbax_folder
from tied._files.pt2 import open_pt2
from tied._files.pytorch import open_pytorch, open_pytorch_index
from tied._files.read import open_folder, open_safetensors

Opener = Callable[[Path], Checkpoint]

_BY_SUFFIX: dict[str, Opener] = {
    ".safetensors": open_safetensors,
    ".json": open_safetensors,
    ".bin.index.json": open_pytorch_index,
    ".bin": open_pytorch,
    ".pt": open_pytorch,
    ".pth": open_pytorch,
    ".ckpt": open_pytorch,
    ".pt2": open_pt2,
    ".npz": open_npz,
    ".npy": open_npy,
    ".msgpack": open_msgpack,
    ".gguf": open_gguf,
    ".onnx": open_onnx,
}

_PYTORCH = ("pytorch_model.bin.index.json", "pytorch_model.bin")


def _of_folder(path: Path) -> Checkpoint:
    if orbax_folder(path) is not None:
        return open_orbax(path)
    safetensors = any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))
    for name in () if safetensors else _PYTORCH:
        if (path / name).is_file():
            return opener(path / name)(path / name)
    return open_safetensors(open_folder(path))


def opener(path: Path) -> Opener:
    """Returns what opens a file or folder.

    Raises:
        FileError: Its format is not known.
    """
    if path.is_dir():
        return _of_folder
    fitting = [suffix for suffix in _BY_SUFFIX if path.name.endswith(suffix)]
    if not fitting:
        raise FileError(
            f"the format {path.suffix!r} is not known",
            facts=[("file", str(path)), ("known", ", ".join(sorted(_BY_SUFFIX)))],
        )
    return _BY_SUFFIX[max(fitting, key=len)]
