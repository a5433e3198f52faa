"""`tied completion`: what a shell needs to complete the command; made of the parser itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tied._cli.printing import Console

SHELLS = ("bash", "zsh", "fish")


class Known(NamedTuple):
    """A command, as a shell knows it: its name, what it does, its options and what they do."""

    name: str
    does: str
    options: dict[str, str]
    takes: tuple[str, ...]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to complete")


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the command."""
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](known(options.parser))
    console.document({"shell": options.shell, "script": script})
    if not console.json:
        sys.stdout.write(script)
    return 0


def known(parser: argparse.ArgumentParser) -> list[Known]:
    """Returns the commands of a parser."""
    (commands,) = (x for x in parser._actions if isinstance(x, argparse._SubParsersAction))
    does = {x.dest: x.help or "" for x in commands._choices_actions}
    return [
        Known(name, does[name], dict(_options(own)), tuple(SHELLS if name == "completion" else ()))
        for name, own in commands.choices.items()
    ]


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        for option in action.option_strings:
            yield option, action.help or ""


def _bash(commands: list[Known]) -> str:
    names = " ".join(command.name for command in commands)
    cases = "\n".join(
        f'        {c.name}) options="{" ".join(c.options)}" words="{" ".join(c.takes)}" ;;'
        for c in commands
    )
    return f"""\
# eval "$(tied completion bash)"
_tied() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" options="--help --version" words=""
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "{names} $options" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$current"))
    elif [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    else
        compopt -o filenames 2>/dev/null || true
        local IFS=$'\\n'
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -F _tied tied
"""


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _zsh(commands: list[Known]) -> str:
    names = " ".join(_quoted(f"{c.name}:{c.does}") for c in commands)
    cases = []
    for command in commands:
        told = [_quoted(f"{option}[{_bare(does)}]") for option, does in command.options.items()]
        words = f"'*:word:({' '.join(command.takes)})'" if command.takes else "'*:file:_files'"
        cases.append(f"        {command.name}) _arguments {' '.join([*told, words])} ;;")
    listed = "\n".join(cases)
    return f"""\
#compdef tied
_tied() {{
    local -a commands=({names})
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    shift words
    (( CURRENT-- ))
    case $words[1] in
{listed}
    esac
}}
compdef _tied tied
"""


def _bare(text: str) -> str:
    """Returns a text without what `_arguments` of zsh would take for its own."""
    return text.translate(str.maketrans("[]:\\", "(),/"))


def _fish(commands: list[Known]) -> str:
    lines = ["# tied completion fish | source"]
    for command in commands:
        first = "complete -c tied -n __fish_use_subcommand -f"
        lines.append(f"{first} -a {command.name} -d {_quoted(command.does)}")
        seen = f"complete -c tied -n '__fish_seen_subcommand_from {command.name}'"
        for option, does in command.options.items():
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            lines.append(f"{seen} {flag} -d {_quoted(does)}")
        if command.takes:
            lines.append(f"{seen} -f -a {_quoted(' '.join(command.takes))}")
    return "\n".join(lines) + "\n"
