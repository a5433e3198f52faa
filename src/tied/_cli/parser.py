"""The commands, their arguments and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import tied
from tied._cli import completion, convert, diff, pack, report, show, unpack, verify
from tied._cli.printing import Console


class Command(NamedTuple):
    """A command: what it does in a few words, what it does, what adds its arguments, what runs."""

    does: str
    text: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Console], int]


COMMANDS = {
    "show": Command(
        "what a checkpoint holds, and what of it is tied",
        """\
Prints each storage and the names that read it, and what a loader that knows no ties will miss.

  tied show model.safetensors
  tied show gpt2/ 'transformer.h.0.*'     only storages of which a name matches
  tied show model.pt --discover           also ties that only the values remember""",
        show.add, show.run,
    ),
    "diff": Command(
        "what two checkpoints disagree on",
        """\
Compares ties, names, shapes, dtypes and values; the formats may differ. Two NaNs are the same, and
so are 0 and -0, unless --bits is given.

  tied diff before.safetensors after.safetensors
  tied diff model.pt model.safetensors --no-values""",
        diff.add, diff.run,
    ),
    "pack": Command(
        "write each storage once, and its ties, as safetensors",
        """\
Writes a safetensors file (or, to a folder, several with an index) that has each storage once and
records its ties. Any reader of safetensors reads the storages.

  tied pack pytorch_model.bin model.safetensors
  tied pack big.safetensors packed/ --discover --checksum --max-shard-bytes 5GB""",
        pack.add, pack.run,
    ),
    "unpack": Command(
        "write an array for every name",
        """\
Writes every name, for readers that know no ties. A safetensors file still says what is tied.

  tied unpack packed.safetensors model.safetensors""",
        unpack.add, unpack.run,
    ),
    "convert": Command(
        "write a checkpoint in another format",
        """\
Writes the format that OUT's ending says; ties are kept where it can hold them.

  tied convert pytorch_model.bin model.safetensors
  tied convert model.safetensors model.npz
  tied convert model.safetensors shards/ --max-shard-bytes 512MiB""",
        convert.add, convert.run,
    ),
    "verify": Command(
        "whether a checkpoint is sound",
        """\
Checks header, offsets, bounds and the tie table, that tied names with a tensor of their own are
equal, and checksums where there are any; says what was checked.

  tied verify model.safetensors""",
        verify.add, verify.run,
    ),
    "report": Command(
        "one page that draws a checkpoint and its ties",
        """\
Writes one page of HTML that needs no network.

  tied report model.safetensors -o ties.html""",
        report.add, report.run,
    ),
    "completion": Command(
        "completion for a shell",
        """\
Prints a script that makes a shell complete `tied`.

  eval "$(tied completion bash)"                              in ~/.bashrc
  eval "$(tied completion zsh)"                               in ~/.zshrc
  tied completion fish > ~/.config/fish/completions/tied.fish""",
        completion.add, completion.run,
    ),
}  # fmt: skip

_TEXT = """\
Ties in checkpoints: shows them, compares them, keeps them.

examples:
  tied show model.safetensors                what is tied in it
  tied show pytorch_model.bin --discover     and what was tied once
  tied diff before/ after/                   what two checkpoints disagree on
  tied pack model.safetensors small.safetensors --discover
                                             each storage once, and its ties
  tied verify small.safetensors              whether it is sound

exit codes:
  0  the same, sound, done
  1  differs, not sound
  2  the input can't be used
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help whose texts stand as they are written, and beside the longest command too."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment  # argparse forgets to count it


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="tied", description=_TEXT, formatter_class=_Help)
    parser.add_argument("--version", action="version", version=f"tied {tied.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name, help=command.does, description=command.text,
            formatter_class=_Help,
        )  # fmt: skip
        own.add_argument("--json", action="store_true", help="print one JSON document")
        own.set_defaults(parser=parser)
        command.add(own)
    return parser
