"""Looks for a file that the reader neither refuses by name nor reads within its bounds.

python fuzz/read_files.py                    a minute of it, from the files in `corpus`
python fuzz/read_files.py -runs=100000       any option of libFuzzer
python fuzz/read_files.py crash-...          one file again
python fuzz/read_files.py --corpus           writes `corpus` anew, after a change of the format

A file that is found is left as `crash-...`; make a case of `tests/test_files_hostile.py` of it.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from hostile_cases import FILES  # noqa: E402
from mutations import judge, mutated, seeds  # noqa: E402
from tied import _checkpoint  # noqa: E402
from tied._files import header, read, table  # noqa: E402

CORPUS = HERE / "corpus"
WATCHED = (header, table, read, _checkpoint, json.decoder)
FOLDER = tempfile.TemporaryDirectory(prefix="tied-fuzz-")
PATH = Path(FOLDER.name) / "x.safetensors"
OPTIONS = (
    f"-artifact_prefix={HERE}/",
    "-max_total_time=60",
    "-max_len=4096",
    "-timeout=10",
    "-rss_limit_mb=2048",
)


def one(content: bytes) -> None:
    """Judges one file."""
    PATH.write_bytes(content)
    judge(PATH)


def write_corpus() -> None:
    """Writes the files that the search begins with."""
    CORPUS.mkdir(exist_ok=True)
    for number, content in enumerate(seeds()):
        (CORPUS / f"{number}.safetensors").write_bytes(content)


def functions() -> Iterator[Any]:
    """Gives the functions whose branches the search looks at."""
    for module in WATCHED:
        inner = vars(module).values()
        holders = [module, *(x for x in inner if inspect.isclass(x))]
        for function in (x for holder in holders for x in vars(holder).values()):
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                yield function


def main() -> None:
    """Searches, as the arguments say."""
    if sys.argv[1:] == ["--corpus"]:
        write_corpus()
        return
    import atheris

    for function in functions():
        atheris.instrument_func(function)
    found = Path(FOLDER.name) / "found"
    found.mkdir()
    for number, (content, _, _) in enumerate(FILES.values()):
        (found / str(number)).write_bytes(content)
    given = sys.argv[1:]
    folders = [] if any(os.path.isfile(x) for x in given) else [str(found), str(CORPUS)]

    def changed(content: bytes, most: int, seed: int) -> bytes:
        """As libFuzzer changes it, or as what the file means."""
        numbers = random.Random(seed)
        if numbers.random() < 0.5:
            return bytes(atheris.Mutate(content, most))
        return mutated(content, numbers)[:most]

    arguments = [sys.argv[0], *OPTIONS, *given, *folders]
    atheris.Setup(arguments, one, custom_mutator=changed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
