"""The command on a terminal: colour and a bar there and nowhere else; Ctrl-C leaves nothing."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import tied
from commands import autoencoder

# The command, made slow: it tells of each piece that was written, and waits a moment.
SLOW = """
import sys, time
from tied._cli import main, progress
from tied._files import container
progress.DELAY = 0
container._CHUNK = 256
told = progress.Progress.__call__
def slow(self, nbytes):
    told(self, nbytes)
    time.sleep(0.05)
progress.Progress.__call__ = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def on_terminal(*arguments: str, both: bool = False) -> tuple[int, str, str]:
    """Runs Python with stderr, and stdout if `both`, on a terminal; returns what each received."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=theirs if both else subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    received = b""
    try:
        while select.select([ours], [], [], 60)[0] and (piece := os.read(ours, 4096)):
            received += piece
    except OSError:  # Linux says so when the other side has gone
        pass
    os.close(ours)
    out = process.communicate(timeout=60)[0] or b""
    return process.returncode, out.decode(), received.decode()


def test_colour_on_a_terminal() -> None:
    path = autoencoder(Path())
    code, _, shown = on_terminal("-m", "tied", "show", str(path), both=True)
    assert code == 0
    assert "\x1b[1mencoder\x1b[0m    (3, 2)  float32  24 B\r\n" in shown
    code, out, error = on_terminal("-m", "tied", "show", "no")
    assert (code, out) == (2, "")
    assert error == "\x1b[31mtied:\x1b[0m there is no such file\r\n  file  no\r\n"


@pytest.mark.parametrize("setting", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour_if_the_terminal_has_none(
    setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*setting)
    _, _, error = on_terminal("-m", "tied", "show", "no")
    assert error == "tied: there is no such file\r\n  file  no\r\n"


def test_a_bar_on_a_terminal_and_gone_at_the_end() -> None:
    save_file({"w": np.zeros(512, "float32")}, "model.safetensors")
    code, out, error = on_terminal("-c", SLOW, "pack", "model.safetensors", "out.safetensors")
    assert code == 0
    assert out == "written   out.safetensors\nstorages  1 storage, 2.00 KiB\n"
    bars = re.findall(
        r"packing  \x1b\[32m━*\x1b\[0m *  +(\d+)%  [\d.]+ K?i?B of 2.00 KiB  [\d.]+ K?M?i?B/s  "
        r"\d:\d\d left",
        error,
    )
    assert len(bars) >= 2
    assert [int(x) for x in bars] == sorted(int(x) for x in bars)
    assert error.endswith("\r\x1b[K")
    code, _, error = on_terminal("-m", "tied", "verify", "out.safetensors")
    assert (code, error) == (0, "")  # too quick for a bar


@pytest.mark.parametrize(
    ("command", "out"),
    [("pack", "out.safetensors"), ("pack", "shards"), ("unpack", "out.safetensors"),
     ("convert", "out.npz"), ("convert", "out.pt")],
)  # fmt: skip
def test_ctrl_c_leaves_nothing(command: str, out: str) -> None:
    weights = {f"w{i}": np.full(64, i, "float32") for i in range(40)}
    save_file(weights, "model.safetensors")
    if out == "shards":
        Path("shards").mkdir()
        tied.save({"old": np.ones(300, "float32")}, "shards")
    before = {str(p): p.read_bytes() for p in Path().rglob("*") if p.is_file()}
    options = ["--max-shard-bytes", "2KB", "--force"] if out == "shards" else []
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, command, "model.safetensors", out, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (parts := list(Path().rglob("*.part"))) or parts[0].stat().st_size < 300:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed, error = process.communicate(timeout=60)
    assert (process.returncode, printed, error) == (130, "", "tied: interrupted\n")
    assert {str(p): p.read_bytes() for p in Path().rglob("*") if p.is_file()} == before
