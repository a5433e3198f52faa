"""`tied completion`: the script for bash, run by bash; all of them know each command and option."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from commands import run
from tied._cli.completion import SHELLS, known
from tied._cli.parser import COMMANDS, make_parser


def script(shell: str) -> str:
    ran = run("completion", shell)
    assert (ran.code, ran.err) == (0, "")
    return ran.out


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _tied\n"
    ask += "printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(
        ["bash", "--norc", "-u", "-c", script("bash") + ask],
        capture_output=True, text=True, check=True, cwd=folder,
    )  # fmt: skip
    assert done.stderr == ""
    return sorted(done.stdout.split("\n")[:-1])


def test_bash(tmp_path: Path) -> None:
    for name in ("model.safetensors", "my model.npz", "other.pt"):
        (tmp_path / name).touch()
    assert completed("tied ", tmp_path) == sorted([*COMMANDS, "--help", "--version"])
    assert completed("tied u", tmp_path) == ["unpack"]
    assert completed("tied show m", tmp_path) == ["model.safetensors", "my model.npz"]
    assert completed("tied show other.pt --d", tmp_path) == ["--discover"]
    assert completed("tied diff --", tmp_path) == sorted(
        ["--all", "--bits", "--help", "--json", "--no-values"]
    )
    assert completed("tied completion ", tmp_path) == sorted(SHELLS)
    assert completed("tied completion z", tmp_path) == ["zsh"]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_command_and_option_is_known(shell: str) -> None:
    text = script(shell)
    commands = known(make_parser())
    assert [command.name for command in commands] == list(COMMANDS)
    for command in commands:
        lines = [line for line in text.splitlines() if command.name in line]
        for option in command.options:
            bare = option.lstrip("-") if shell == "fish" else option
            assert any(bare in line for line in lines), (command.name, option)


def test_a_shell_that_is_not_known() -> None:
    ran = run("completion", "tcsh")
    assert ran.code == 2
    assert "invalid choice: 'tcsh'" in ran.err


def test_texts_are_quoted_for_each_shell() -> None:
    assert "'--max-shard-bytes[write several files of at most so many, 5GB, 512MiB]'" in script(
        "zsh"
    )
    assert "-l max-shard-bytes -d 'write several files of at most so many: 5GB, 512MiB'" in script(
        "fish"
    )


def test_json() -> None:
    assert run("completion", "bash", "--json").json == {
        "command": "completion", "shell": "bash", "script": script("bash"),
    }  # fmt: skip
