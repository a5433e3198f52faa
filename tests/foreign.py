"""Checkpoints of other formats, each written by the library that the format comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import onnx
import orbax.checkpoint as ocp
import pytest
import torch
from flax import serialization
from torch import nn

import tied


def values() -> dict[str, Any]:
    """Arrays of several dtypes and shapes, with NaNs that carry bits."""
    w = np.arange(12, dtype="float32").reshape(3, 4)
    w.view("uint32")[0, :2] = 0x7FC12345, 0xFFC00001
    return {
        "layer.w": w,
        "layer.b": np.array([1.5, -0.0, np.nan], "float16"),
        "n": np.array(7, "int64"),
        "flags": np.array([True, False]),
        "none": np.zeros((0, 3), "float32"),
    }


def write_npz(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


def write_compressed_npz(path: Path, arrays: dict[str, Any]) -> None:
    np.savez_compressed(path, **arrays)


def write_torch(path: Path, arrays: dict[str, Any]) -> None:
    torch.save({name: torch.from_numpy(x) for name, x in arrays.items()}, path)


def write_old_torch(path: Path, arrays: dict[str, Any]) -> None:
    state = {name: torch.from_numpy(x) for name, x in arrays.items()}
    torch.save(state, path, _use_new_zipfile_serialization=False)


class Holder(nn.Module):
    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__()
        for name, x in tensors.items():
            owner = self
            *modules, leaf = name.split(".")
            for module in modules:
                if not hasattr(owner, module):
                    owner.add_module(module, nn.Module())
                owner = getattr(owner, module)
            owner.register_buffer(leaf, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def write_pt2(path: Path, arrays: dict[str, Any]) -> None:
    # torch.export 2.13 fails on tensors without elements.
    module = Holder({name: torch.from_numpy(x) for name, x in arrays.items() if x.size})
    torch.export.save(torch.export.export(module, (torch.ones(1),)), path)


def write_msgpack(path: Path, arrays: dict[str, Any]) -> None:
    tree: dict[str, Any] = {"layer": {}}
    for name, x in arrays.items():
        place, _, leaf = name.rpartition(".")
        (tree[place] if place else tree)[leaf] = x
    path.write_bytes(serialization.to_bytes(tree))


def write_onnx(path: Path, arrays: dict[str, Any]) -> None:
    onnx.save(model([onnx.numpy_helper.from_array(x, name) for name, x in arrays.items()]), path)


def write_onnx_beside(path: Path, arrays: dict[str, Any]) -> None:
    made = model([onnx.numpy_helper.from_array(x, name) for name, x in arrays.items()])
    onnx.save(made, path, save_as_external_data=True, location="weights.data", size_threshold=0)


def model(tensors: list[Any]) -> Any:
    return onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], tensors))


def write_orbax(
    path: Path, arrays: dict[str, Any], ocdbt: bool = True, zarr3: bool = False
) -> None:
    tree = {"layer": {"w": arrays["layer.w"], "b": arrays["layer.b"]}, "n": arrays["n"],
            "flags": arrays["flags"]}  # fmt: skip
    with ocp.PyTreeCheckpointer(use_ocdbt=ocdbt, use_zarr3=zarr3) as checkpointer:
        checkpointer.save(path, tree)


def write_orbax_files(path: Path, arrays: dict[str, Any]) -> None:
    write_orbax(path, arrays, ocdbt=False)


def write_orbax_zarr3(path: Path, arrays: dict[str, Any]) -> None:
    write_orbax(path, arrays, zarr3=True)


def write_orbax_jax(path: Path, arrays: dict[str, Any]) -> None:
    write_orbax(path, {name: jnp.asarray(x) for name, x in arrays.items() if name != "n"}
                | {"n": arrays["n"]})  # fmt: skip


def write_orbax_step(path: Path, arrays: dict[str, Any]) -> None:
    tree = {"layer": {"w": arrays["layer.w"], "b": arrays["layer.b"]}, "n": arrays["n"],
            "flags": arrays["flags"]}  # fmt: skip
    with ocp.CheckpointManager(path.parent) as manager:
        manager.save(int(path.name), args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()


def write_gguf(path: Path, arrays: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("nested", [[1, 2], [3, 4]])
    for name, x in arrays.items():
        if x.dtype != bool and x.size and x.ndim:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


WRITERS: dict[str, tuple[str, Callable[[Path, dict[str, Any]], None]]] = {
    "npz": ("m.npz", write_npz),
    "npz, compressed": ("m.npz", write_compressed_npz),
    "pt": ("m.pt", write_torch),
    "pth, older than 1.6": ("m.pth", write_old_torch),
    "bin": ("pytorch_model.bin", write_torch),
    "pt2": ("m.pt2", write_pt2),
    "msgpack": ("m.msgpack", write_msgpack),
    "onnx": ("m.onnx", write_onnx),
    "onnx, data beside": ("m.onnx", write_onnx_beside),
    "orbax": ("step", write_orbax),
    "orbax, jax": ("step", write_orbax_jax),
    "orbax, files": ("step", write_orbax_files),
    "orbax, zarr3": ("step", write_orbax_zarr3),
    "orbax, manager": ("3", write_orbax_step),
    "gguf": ("m.gguf", write_gguf),
}


def written(kind: str, folder: Path) -> Path:
    """A checkpoint with `values()`, or as many of them as the format has."""
    name, write = WRITERS[kind]
    write(folder / name, values())
    return folder / name


def refused(path: Path) -> str:
    """The error that a file gives."""
    with pytest.raises(tied.FileError) as caught:
        tied.load(path)
    return str(caught.value)


def untrusted(path: Path, what: str, name: str | None = None) -> str:
    lines = [f"this checkpoint can't be trusted: {what}"]
    wide = "" if name is None else "  "
    lines.append(f"  file {wide} {path}")
    lines += [] if name is None else [f"  tensor  {name}"]
    return "\n".join(lines)
