"""Runs the command `tied`, in this process, and makes the small checkpoints that it is tried on."""

from __future__ import annotations

import contextlib
import io
import json
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tied
from tied._cli import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document that was printed, without what each has."""
        assert self.err == ""
        assert self.out.count("\n") == 1
        told = json.loads(self.out)
        assert told.pop("version") == 1
        return told


def run(*arguments: object) -> Ran:
    """Runs the command; `out` and `err` are no terminals."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())


def text(block: str) -> str:
    """A text in a test, as it is printed."""
    return textwrap.dedent(block).lstrip("\n")


def autoencoder(folder: Path) -> Path:
    """A matrix that two names read, one of them transposed, and a bias."""
    weight = np.arange(6, dtype="float32").reshape(3, 2)
    model = {"encoder": weight, "decoder": weight.T, "bias": np.zeros(3, "float32")}
    return tied.save(model, folder / "model.safetensors")
