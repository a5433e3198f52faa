"""The command as a whole: help, exit codes, errors, JSON, colour, `python -m tied`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import tied
from commands import autoencoder, run, text
from tied import _cli
from tied._cli import progress, show
from tied._cli.parser import COMMANDS

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def test_the_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"tied": "tied._cli:main"}
    assert callable(_cli.main)


def test_help_has_examples_that_can_be_typed() -> None:
    ran = run("--help")
    assert (ran.code, ran.err) == (0, "")
    lines = [line.strip() for line in ran.out.splitlines()]
    examples = [line.split("  ")[0] for line in lines if line.startswith("tied ")]
    assert len(examples) == 5
    does = {command.does: name for name, command in COMMANDS.items()}
    told = [(line.split(" ")[0], line.partition("  ")[2].strip()) for line in lines]
    assert [name for name, said in told if said in does and name != "tied"] == [*does.values()]
    for name in COMMANDS:
        told = run(name, "--help")
        assert (told.code, told.err) == (0, "")
        own = [line for line in told.out.splitlines() if line.startswith(f"  tied {name} ")]
        own += [line for line in told.out.splitlines() if line.startswith(f'  eval "$(tied {name}')]
        assert own
        assert max(map(len, told.out.splitlines())) <= 100


def test_usage_errors() -> None:
    for arguments in ([], ["shwo", "x"], ["show"], ["diff", "a"], ["show", "a", "--colour"]):
        ran = run(*arguments)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("usage: tied ")
    assert run("--version") == (0, f"tied {tied.__version__}\n", "")


def test_errors_are_one_paragraph_on_stderr() -> None:
    Path("model.safetensors").write_bytes(b"\xff" * 20)
    Path("model.h5").write_bytes(b"")
    autoencoder(Path("."))
    Path("broken.safetensors").write_bytes(Path("model.safetensors").read_bytes() + b"\0")
    for name in ("nothing.safetensors", "broken.safetensors", "model.h5"):
        for arguments in (
            ["show", name], ["diff", "model.safetensors", name], ["diff", name, name],
            ["pack", name, "out.safetensors"], ["unpack", name, "out.safetensors"],
            ["convert", name, "out.npz"], ["verify", name], ["report", name],
        ):  # fmt: skip
            ran = run(*arguments)
            assert (ran.code, ran.out) == (2, "")
            assert ran.err.startswith("tied: ")
            assert f"  file   {name}\n" in ran.err or f"  file  {name}\n" in ran.err
            assert "\n\n" not in ran.err
            assert "Traceback" not in ran.err
    assert run("show", "broken.safetensors").err == text("""
        tied: this checkpoint can't be trusted: 1 bytes behind the last tensor
          file  broken.safetensors
        """)


def test_errors_as_json() -> None:
    ran = run("show", "nothing", "--json")
    assert ran.code == 2
    assert json.loads(ran.out) == {
        "version": 1,
        "command": "show",
        "error": {
            "message": "there is no such file", "facts": [["file", "nothing"]], "hint": "",
            "paths": [],
        },
    }  # fmt: skip
    assert ran.err == "tied: there is no such file\n  file  nothing\n"


def test_the_docs_name_every_key_of_the_documents() -> None:
    path = autoencoder(Path())
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    for command, arguments in {
        "show": [path], "diff": [path, path], "pack": [path, "a.safetensors"],
        "unpack": [path, "b.safetensors"], "convert": [path, "c.npz"], "verify": [path],
        "report": [path],
    }.items():  # fmt: skip
        told = run(command, *arguments, "--json").json
        named = set(re.findall(r"`(\w+)`", rows[command]))
        inner = {key for rows in told.values() if isinstance(rows, list)
                 for row in rows if isinstance(row, dict) for key in row}  # fmt: skip
        assert told.keys() - {"command"} <= named
        assert named <= told.keys() | inner


def test_errors_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, said in [
        (PermissionError(13, "Permission denied", "a.safetensors"),
         "permission denied: a.safetensors"),
        (OSError(18, "Invalid cross-device link", "a", None, "b"),
         "invalid cross-device link: a, b"),
        (OSError("something"), "something"),
    ]:  # fmt: skip

        def fails(path: object, error: OSError = error) -> None:
            raise error

        monkeypatch.setattr(show, "open_checkpoint", fails)
        assert run("show", "a") == (2, "", f"tied: {said}\n")


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(show, "open_checkpoint", interrupted)
    assert run("show", "a") == (130, "", "tied: interrupted\n")


def test_warnings_are_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(path: object) -> None:
        warnings.warn("take care", tied.TiedWarning, stacklevel=2)
        raise tied.FileError("enough")

    monkeypatch.setattr(show, "open_checkpoint", warned)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run("show", "a") == (2, "", "tied: warning: take care\ntied: enough\n")


def test_what_is_no_error_of_the_input_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(show, "open_checkpoint", broken)
    with pytest.raises(ZeroDivisionError):
        run("show", "a")


def test_colour_only_where_it_is_forced_or_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    path = autoencoder(Path())
    for arguments in (["show", path], ["diff", path, path], ["verify", path], ["show", "no"]):
        plain = run(*arguments)
        assert "\x1b" not in plain.out + plain.err
        monkeypatch.setenv("FORCE_COLOR", "1")
        forced = run(*arguments)
        assert "\x1b[" in forced.out + forced.err
        assert "\x1b" not in run(*arguments[:1], path, *arguments[1:2], "--json").out
        monkeypatch.setenv("NO_COLOR", "1")
        assert run(*arguments) == plain
        monkeypatch.setenv("FORCE_COLOR", "")
        monkeypatch.setenv("NO_COLOR", "")
        assert run(*arguments) == plain


def test_colours_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    path = autoencoder(Path())
    plain = run("show", path).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run("show", path).out
    assert "\x1b[1mencoder\x1b[0m    (3, 2)" in coloured
    assert "  \x1b[36mdecoder = encoder.T\x1b[0m\n" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain


def test_a_bar_says_what_is_done() -> None:
    bar = progress.Progress("packing", 3 << 20)
    bar._done = 1 << 20
    assert bar._line(0.5, 79) == (
        "packing  ━━━━━━                33%  1.00 MiB of 3.00 MiB  2.00 MiB/s  0:01 left"
    )
    assert bar._line(0.5, 30) == "packing  33%  1.00 MiB of 3.00"
    assert progress._clock(3725) == "1:02:05"
    bar._total = 0
    assert "100%" in bar._line(0.0, 100)


def test_no_bar_without_a_terminal() -> None:
    save_file({"w": np.zeros(4)}, "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "DELAY", 0)
        patch.setenv("FORCE_COLOR", "1")
        assert run("pack", "model.safetensors", "out.safetensors").err == ""


COMMAND = [sys.executable, "-m", "tied"]


def test_python_m_tied_and_a_reader_that_goes_away() -> None:
    path = autoencoder(Path())
    done = subprocess.run([*COMMAND, "show", path], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (run("show", path).out, "")
    # Nobody reads: as `tied show model | head -0` has it.
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run(
        [*COMMAND, "show", path], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (141, "")


def test_a_locale_without_the_letters_of_a_name() -> None:
    save_file({"ключ": np.zeros(1)}, "model.safetensors")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*COMMAND, "show", "model.safetensors"], capture_output=True, check=True, env=environment
    )
    assert done.stdout.startswith(b"\\u043a\\u043b\\u044e\\u0447    (1,)  float64  8 B\n")


def test_the_command_loads_no_framework() -> None:
    path = autoencoder(Path())
    code = (
        "import sys\nfrom tied._cli import main\n"
        f"main(['verify', {str(path)!r}]); main(['pack', {str(path)!r}, 'out.safetensors'])\n"
        "print(*({'torch', 'jax', 'safetensors', 'ml_dtypes', 'onnx'} & set(sys.modules)), 'none')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "none"
