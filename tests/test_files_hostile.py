"""Files that a stranger wrote: refused by name, at once, before any memory is taken for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import hostile
import tied
from hostile import ROW, W, file, metadata, more, of, row, table, tensor, two
from hostile_cases import C64, FILES
from tied._checkpoint import open_checkpoint


def refused(path: Path, most: int = 4 << 20) -> tied.FileError:
    """The error that a file gives, at once and with little memory, from each way to read it."""
    start = time.thread_time()
    with pytest.raises(tied.FileError) as caught:
        open_checkpoint(path)
    assert time.thread_time() - start < 2
    tracemalloc.start()
    try:
        with pytest.raises(tied.FileError) as again:
            tied.load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(again.value) == str(caught.value)
    assert peak <= most
    return caught.value


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_sound(name: str, tmp_path: Path) -> None:
    content, text, paths = FILES[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    error = refused(path, (4 << 20) + 40 * len(content))
    assert error.message.startswith("this checkpoint can't be trusted: ")
    assert text in error.message
    assert error.paths == paths
    assert error.facts == (
        (("file", str(path)), ("tensor", paths[0])) if paths else (("file", str(path)),)
    )


def test_the_files_that_the_cases_change_are_sound(tmp_path: Path) -> None:
    """Else the cases would be refused for something else."""
    path = tmp_path / "x.safetensors"
    sound = {
        "tensor": tensor(), "metadata": metadata(a="b"), "row": row(),
        "two": two([0, 4], [4, 8], 8),
        "table": table({"version": 1, "aliases": {}}), "more": more(unnamed=["w"]),
        "unknown member of the table": more(later=[1]),
        "computed": more(computed={"c": ["w"]}),
        "conj": row(C64, shape=[3], strides=[1], conj=True),
        "neg": row(neg=True), "bits": row(shape=[5], strides=[4], offset=3, dtype="F32"),
        "backwards": row(shape=[6], strides=[-1], offset=5), "none": row(shape=[0, 2], offset=6),
        "back and forth": row(shape=[3, 3], strides=[-2, 2], offset=4, of="w",
                              w=of("U8", [9], 9), data=bytes(9)),
        "64 dimensions": tensor(bytes(4), shape=[1] * 64, data_offsets=[0, 4]),
        "repeated": row(shape=[1 << 40], strides=[0]),
        "none of many": tensor(b"", shape=[0, 1 << 40], data_offsets=[0, 0]),
    }  # fmt: skip
    for name, content in sound.items():
        path.write_bytes(content)
        loaded = tied.load(path)
        assert ("v" in loaded) == (b'\\"v\\"' in content), name


def test_a_header_of_100_mb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as opened:
        opened.write((100_000_001).to_bytes(8, "little"))
        opened.truncate(200_000_000)  # a hole: it takes no room
    assert refused(path, 1 << 20).message == (
        "this checkpoint can't be trusted: a header of 100,000,001 bytes; "
        "at most 100,000,000 are read"
    )


LIMITED = """
import json, resource, sys, time
import tied
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20),) * 2)
found = {}
for path in sys.argv[1:]:
    start = time.process_time()
    try:
        tied.load(path)
    except tied.FileError as error:
        found[path] = time.process_time() - start
print(json.dumps(found))
"""


def test_they_are_refused_under_a_limit_on_memory(tmp_path: Path) -> None:
    """Address space, too: nothing is mapped or set aside for what a header says."""
    paths = []
    for number, (content, _, _) in enumerate(FILES.values()):
        paths.append(str(tmp_path / f"{number}.safetensors"))
        Path(paths[-1]).write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == paths
    assert max(found.values()) < 2


# -------------------------------------------------------------------------------- the metadata


@pytest.mark.parametrize(
    "members",
    [{"format": "w"}, {"v": "u"}, {"w": "w"}, {"v": "v"}, {"a": "b", "b": "a"}],
    ids=str,
)
def test_metadata_that_is_no_alias(members: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file({"__metadata__": members, "w": W}))
    assert list(tied.load(path)) == ["w"]


def test_a_row_comes_before_an_alias_of_hugging_face(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    told = json.dumps({"version": 1, "aliases": {"v": ROW}})
    path.write_bytes(metadata(v="w", tied=told))
    assert tied.load(path)["v"].shape == (3, 2)


# ----------------------------------------------------------------------------------- the index

SOUND = tensor()
OTHER = file({"u": W})
X = {"w": "x.safetensors"}
LEAVES = ("../x.safetensors", "/etc/passwd", "a/x.safetensors", "..", ".", "", "a\\b", "a\0b",
          "./x.safetensors")  # fmt: skip


@pytest.mark.parametrize("name", LEAVES)
def test_an_index_does_not_leave_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(SOUND)
    path = hostile.index(tmp_path / "folder", {"weight_map": {"w": name}}, x=SOUND)
    error = refused(path)
    assert error.message == (
        f"this checkpoint can't be trusted: the index leads out of its folder: {name!r}"
    )
    assert error.paths == ("w",)


INDICES: dict[str, tuple[Any, dict[str, bytes], str, tuple[str, ...]]] = {
    "no JSON": (b"", {}, "no JSON", ()),
    "a list": ([], {}, "JSON that is no object", ()),
    "nested deep": (b"[" * 100_000, {}, "nested too deep", ()),
    "5,000 digits": (b'{"metadata":' + b"9" * 5000 + b"}", {}, "no JSON", ()),
    "a key twice": (b'{"weight_map":{"w":"x","w":"y"}}', {}, "a key that is there twice", ("w",)),
    "no map": ({}, {}, "an index without a weight_map of strings", ()),
    "the map is a list": ({"weight_map": []}, {}, "an index without a weight_map", ()),
    "a file that is a number": ({"weight_map": {"w": 1}}, {}, "without a weight_map", ()),
    "a file that is no text": (b'{"weight_map":{"w":"\\ud800"}}', {}, "that can't be", ("w",)),
    "a file that is not there": ({"weight_map": {"w": "y"}}, {}, "is not there", ()),
    "a file of 5,000 letters": ({"weight_map": {"w": "y" * 5000}}, {}, "that can't be", ("w",)),
    "a tensor that is not there": ({"weight_map": {"u": "x.safetensors"}}, {"x": SOUND},
                                   "the index has it here, the file has not", ("u",)),
    "no tensors": ({"weight_map": {}}, {"x": SOUND}, "an index of no files", ()),
    "a tensor in two files": ({"weight_map": {"w": "x.safetensors", "u": "y.safetensors"}},
                              {"x": SOUND, "y": file({"u": of("U8", [4], 4), "w":
                               {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, bytes(8))},
                              "another file of the checkpoint has it too", ("w",)),
    "an alias of two files": (
        {"weight_map": {"w": "x.safetensors", "v": "y.safetensors"}},
        {"x": row(), "y": file({"v": W})}, "an alias that is stored too", ("v",)),
    "the index itself": ({"weight_map": {"w": "model.safetensors.index.json"}}, {},
                         "at most 100,000,000 are read", ()),
    "one that is cut off": ({"weight_map": X}, {"x": SOUND[:-1]}, "in 23 bytes of data", ("w",)),
}  # fmt: skip


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_is_not_sound(name: str, tmp_path: Path) -> None:
    told, files, text, paths = INDICES[name]
    error = refused(hostile.index(tmp_path, told, **files), 16 << 20)
    assert text in error.message
    assert error.paths == paths
    assert error.facts[0][0] == "file"


def test_links_in_a_folder_are_followed_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    path = hostile.index(tmp_path / "snapshot", {"weight_map": X})
    (tmp_path / "blob").write_bytes(SOUND)
    (path.parent / "x.safetensors").symlink_to("../blob")
    assert tied.load(path)["w"].shape == (2, 3)


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    path = hostile.index(tmp_path, {"weight_map": X})
    (tmp_path / "x.safetensors").symlink_to("x.safetensors")
    assert refused(path).facts[-1][1].endswith("x.safetensors")
    assert refused(tmp_path / "x.safetensors").facts == (("file", str(tmp_path / "x.safetensors")),)


def test_what_is_no_file(tmp_path: Path) -> None:
    """A pipe would be waited for, for ever."""
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for path in (tmp_path / "pipe.safetensors", tmp_path / "folder.safetensors",
                 tmp_path / "nothing.safetensors"):  # fmt: skip
        refused(path)
    for name in ("pipe", "folder"):
        path = hostile.index(tmp_path, {"weight_map": {"w": f"{name}.safetensors"}})
        refused(path)


def test_an_index_of_any_length_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    with path.open("wb") as opened:
        opened.truncate(100_000_001)
    assert "100,000,00" in refused(path, 1 << 20).message


def test_a_folder_with_nothing_or_too_much(tmp_path: Path) -> None:
    refused(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(SOUND)
    error = refused(tmp_path)
    assert error.facts == (("folder", str(tmp_path)), ("found", "a.safetensors, b.safetensors"))


def test_one_file_of_several_is_no_checkpoint(tmp_path: Path) -> None:
    """What a save that was killed leaves, or a download that was broken off."""
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(SOUND)
    refused(tmp_path)


@pytest.mark.parametrize(
    ("impl", "shape"), [("nope", [3, 2]), ("threefry2x32", [6]), ("rbg", [3, 2])]
)
def test_random_keys_that_are_none(impl: str, shape: list[int], tmp_path: Path) -> None:
    """They are numbers to NumPy; only JAX can say that they are no keys."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(table({"version": 1, "keys": {"w": impl}}, of("U32", shape, 24)))
    assert tied.load(path)["w"].shape == tuple(shape)
    with pytest.raises(tied.FileError) as caught:
        tied.load(path, framework="jax")
    assert caught.value.paths == ("w",)


def test_a_part_of_random_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    row = {"of": "w", "shape": [2, 2], "strides": [2, 1], "offset": 0}
    told = {"version": 1, "aliases": {"v": row}, "keys": {"w": "threefry2x32"}}
    path.write_bytes(table(told, of("U32", [3, 2], 24)))
    assert refused(path).paths == ("v",)


def test_a_file_that_becomes_shorter_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(SOUND)
    contents = open_checkpoint(path)
    path.write_bytes(SOUND[:-4])
    with pytest.raises(tied.FileError, match="a file that has become shorter"):
        contents.storages["w"].memory()
