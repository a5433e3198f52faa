"""Sessions in a shell on a page: ```console blocks, whose commands start with `$ `.

The blocks of a page, those of Python too, run from top to bottom in one folder; blocks of Python
with no session in between are one program. Run as a program, this writes what the commands print
into pages: `python tests/sessions.py docs/cli.md`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(
    r"^```(?P<language>console|python)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_MARK = "\x1e"  # printed behind each command


def has_session(page: Path) -> bool:
    return "```console" in page.read_text(encoding="utf-8")


def played(text: str, folder: Path) -> str:
    """Returns a page with what its commands print in a folder."""

    program: list[str] = []

    def block(match: re.Match[str]) -> str:
        if match["language"] == "python":
            program.append(match["code"])
            return match[0]
        if program:
            _run([sys.executable, "-c", "".join(program)], folder)
            program.clear()
        commands = [x[2:] for x in match["code"].splitlines() if x.startswith("$ ")]
        script = 'tied() { "$PYTHON" -m tied "$@"; }\n'
        for command in commands:  # the exit code is that of the command for the one behind it
            script += f"{command}\ncode=$?; printf '{_MARK}'; (exit $code)\n"
        printed = _run(["bash", "--norc", "-c", script], folder).split(_MARK)[:-1]
        assert len(printed) == len(commands), printed
        told = [f"$ {c}\n{_stripped(p)}" for c, p in zip(commands, printed, strict=True)]
        return f"```console\n{''.join(told)}```"

    return _BLOCK.sub(block, text)


def _stripped(printed: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in printed.splitlines())


def _run(command: list[str], folder: Path) -> str:
    """Returns what a program prints, to stderr too; its exit code is its own affair."""
    environment = {**os.environ, "PYTHON": sys.executable, "COLUMNS": "80"}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *sys.path])
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        env=environment, check=command[0] == sys.executable,
    )  # fmt: skip
    return done.stdout


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as made:
            page = Path(name)
            page.write_text(played(page.read_text("utf-8"), Path(made)), encoding="utf-8")
