"""The command `tied`: one file for each of its commands, `run.py` leads to them."""

from tied._cli.run import main

__all__ = ["main"]
