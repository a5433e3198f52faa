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
from tied._checkpoint import open_checkpoint

BIG = 1 << 62
DIGITS = b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,24]}}'
NAME = b'{"\\ud800":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
KEYS = b"{" + b",".join(b'"%d":1' % n for n in range(100_000)) + b',"7":1}'

# What the file is; what the error says; the tensors that it names.
HEADERS: dict[str, tuple[bytes, str, tuple[str, ...]]] = {
    "nothing": (b"", "at least 8 bytes, this one has 0", ()),
    "seven bytes": (bytes(7), "at least 8 bytes, this one has 7", ()),
    "truncated header": (file({"w": W}, b"")[:-1], "a header of", ()),
    "header longer than the file": (file({"w": W}, length=1000), "a header of 1,000 bytes", ()),
    "header of 100 MB and a byte": (file({}, length=10**8 + 1), "a header of 100,000,001", ()),
    "header of 2**63": (file({}, length=1 << 63), "a header of 9,223,372,036,854,775,808", ()),
    "header of 2**64 - 1": (file({}, length=(1 << 64) - 1), "a header of 18,446,744", ()),
    "no header": (file(b"", b""), "no JSON", ()),
    "no UTF-8": (file(b'{"\xff":1}'), "no JSON", ()),
    "a byte order mark": (file(b"\xef\xbb\xbf{}", b""), "no JSON", ()),
    "two objects": (file(b"{}{}", b""), "no JSON", ()),
    "a list": (file([]), "JSON that is no object", ()),
    "a text": (file("w"), "JSON that is no object", ()),
    "NaN": (file(b'{"w":NaN}'), "NaN in JSON", ()),
    "Infinity": (file(b'{"w":{"shape":[-Infinity]}}'), "-Infinity in JSON", ()),
    "lists, nested deep": (file(b"[" * 100_000), "nested too deep", ()),
    "objects, nested deep": (file(b'{"a":' * 100_000), "nested too deep", ()),
    "5,000 digits": (file(DIGITS), "no JSON", ()),
    "a key twice": (file(b'{"w":1,"w":2}'), "a key that is there twice", ("w",)),
    "a member twice": (file(b'{"w":{"dtype":1,"dtype":1}}'), "is there twice", ("dtype",)),
    "100,000 keys, one twice": (file(KEYS), "a key that is there twice", ("7",)),
    "a name that is no text": (file(NAME), "a name that is no text", ("'\\ud800'",)),
    "metadata is null": (file({"__metadata__": None}, b""), "no object of strings", ()),
    "metadata is a list": (file({"__metadata__": []}, b""), "no object of strings", ()),
    "metadata of numbers": (metadata(a=1), "no object of strings", ()),
    "a tensor is null": (file({"w": None}), "a tensor needs dtype, shape and", ("w",)),
    "a tensor is a list": (file({"w": []}), "a tensor needs dtype, shape and", ("w",)),
    "a member too few": (file({"w": {"dtype": "F32"}}), "a tensor needs dtype, shape", ("w",)),
    "a member too many": (tensor(more=1), "a tensor needs dtype, shape and", ("w",)),
    "an unknown dtype": (tensor(dtype="F31"), "the dtype 'F31'", ("w",)),
    "a dtype in lower case": (tensor(dtype="f32"), "the dtype 'f32'", ("w",)),
    "the dtype is a list": (tensor(dtype=["F32"]), "the dtype ['F32']", ("w",)),
    "the dtype is an object": (tensor(dtype={}), "the dtype {}", ("w",)),
    "the dtype is null": (tensor(dtype=None), "the dtype None", ("w",)),
    "the shape is a text": (tensor(shape="23"), "a shape that is no list", ("w",)),
    "a negative dimension": (tensor(shape=[-2, -3]), "a shape [-2, -3]", ("w",)),
    "a fraction": (tensor(shape=[2.0, 3]), "a shape [2.0, 3]", ("w",)),
    "an exponent": (file(b'{"w":{"dtype":"U8","shape":[1e400],"data_offsets":[0,24]}}'),
                    "a shape [inf]", ("w",)),
    "true": (tensor(shape=[True, 6]), "a shape [True, 6]", ("w",)),
    "a dimension of 2**63": (tensor(shape=[1 << 63]), "a shape [9223372036854775808]", ("w",)),
    "65 dimensions": (tensor(shape=[1] * 65), "at most 64", ("w",)),
    "2**64 elements": (tensor(shape=[1 << 32, 1 << 32]), "more than 2**63 bytes", ("w",)),
    "2**64 + 6 elements": (tensor(shape=[2, 3, (1 << 62) + 1]), "takes", ("w",)),
    "elements that overflow to 6": (tensor(shape=[(1 << 63) - 1, 10]), "more than 2**63", ("w",)),
    "none of too many elements": (tensor(b"", shape=[0, BIG, BIG], data_offsets=[0, 0]),
                                  "2**63", ("w",)),
    "none of 2**62 elements": (tensor(b"", shape=[BIG, 0], data_offsets=[0, 0]), "2**63", ("w",)),
    "bytes of another shape": (tensor(shape=[2, 2]), "takes 16 bytes, not 24", ("w",)),
    "three offsets": (tensor(data_offsets=[0, 24, 24]), "offsets", ("w",)),
    "one offset": (tensor(data_offsets=[24]), "offsets [24] in 24 bytes", ("w",)),
    "offsets of texts": (tensor(data_offsets=["0", "24"]), "offsets ['0', '24']", ("w",)),
    "a negative offset": (tensor(data_offsets=[-24, 0]), "offsets [-24, 0]", ("w",)),
    "offsets in the wrong order": (tensor(data_offsets=[24, 0]), "offsets [24, 0] in", ("w",)),
    "an offset behind the file": (tensor(data_offsets=[1, 25]), "in 24 bytes of data", ("w",)),
    "an offset of 2**63 - 1": (tensor(data_offsets=[0, (1 << 63) - 1]), "in 24 bytes", ("w",)),
    "data that is cut off": (file({"w": W}, hostile.DATA[:-1]), "in 23 bytes of data", ("w",)),
    "half a byte": (tensor(b"0", dtype="F4", shape=[1], data_offsets=[0, 1]), "takes", ("w",)),
    "overlapping tensors": (two([0, 4], [3, 8], 8), "bytes that overlap others", ("b",)),
    "one tensor within another": (two([0, 8], [2, 4], 8), "bytes that overlap others", ("b",)),
    "two tensors of the same bytes": (two([0, 8], [0, 8], 8), "overlap others", ("b",)),
    "a hole": (two([0, 4], [5, 8], 8), "bytes that leave a hole before them", ("b",)),
    "a hole at the start": (two([1, 4], [4, 8], 8), "leave a hole before them", ("a",)),
    "bytes behind": (two([0, 4], [4, 8], 9), "1 bytes behind the last tensor", ()),
}  # fmt: skip

C64, BOOL, F4 = of("C64", [3], 24), of("BOOL", [2, 3], 6), of("F4", [2, 2], 2)
TABLES: dict[str, tuple[bytes, str, tuple[str, ...]]] = {
    "no JSON": (table(""), "no JSON", ()),
    "a list": (table("[]"), "JSON that is no object", ()),
    "nested deep": (table("[" * 50_000), "nested too deep", ()),
    "NaN": (table('{"version":NaN}'), "NaN in JSON", ()),
    "5,000 digits": (table('{"version":' + "9" * 5000 + "}"), "no JSON", ()),
    "no text": (file(b'{"__metadata__":{"tied":"\\ud800"}}', b""), "metadata that is no", ()),
    "an alias twice": (table(f'{{"version":1,"aliases":{{"v":{json.dumps(ROW)},"v":1}}}}'),
                       "a key that is there twice", ("v",)),
    "no version": (table({"aliases": {}}), "a tie table of version None; this is read: 1", ()),
    "version 2": (table({"version": 2}), "a tie table of version 2; this is read: 1", ()),
    "version 1.0": (table({"version": 1.0, "aliases": {}}), "version 1.0", ()),
    "version true": (table({"version": True, "aliases": {}}), "version True", ()),
    "version '1'": (table({"version": "1", "aliases": {}}), "version '1'", ()),
    "aliases are a list": (table({"version": 1, "aliases": []}), "aliases are no object", ()),
    "a row is a list": (table({"version": 1, "aliases": {"v": []}}), "a row of the tie", ("v",)),
    "a row is null": (table({"version": 1, "aliases": {"v": None}}), "a row of the tie", ("v",)),
    "an unknown member": (row(more=1), "a row of the tie table that is none", ("v",)),
    "no storage": (row(of=None), "it reads None, which is no storage", ("v",)),
    "another storage": (row(of="u"), "it reads 'u', which is no storage", ("v",)),
    "a storage that is a number": (row(of=1), "it reads 1, which is no storage", ("v",)),
    "a storage that is a list": (row(of=["w"]), "it reads ['w'], which is no", ("v",)),
    "itself": (row(of="v"), "it reads 'v', which is no storage", ("v",)),
    "an alias of an alias": (
        table({"version": 1, "aliases": {"v": ROW, "u": {**ROW, "of": "v"}}}),
        "an alias that can't be one", ("v",)),
    "a cycle": (
        table({"version": 1, "aliases": {"v": {**ROW, "of": "u"}, "u": {**ROW, "of": "v"}}}),
        "it reads 'u', which is no storage", ("v",)),
    "named like a storage": (table({"version": 1, "aliases": {"w": ROW}}),
                             "an alias that can't be one", ("w",)),
    "named like a storage, expanded": (
        table({"version": 1, "aliases": {"w": ROW}, "expanded": True}),
        "an alias that can't be one", ("w",)),
    "expanded, but not stored": (
        more(expanded=True), "an expanded alias that is not stored as it reads", ("v",)),
    "expanded is a number": (more(expanded=1), "expanded", ()),
    "named __metadata__": (table({"version": 1, "aliases": {"__metadata__": ROW}}),
                           "an alias that can't be one", ("__metadata__",)),
    "a name that is no text": (
        table(json.dumps({"version": 1, "aliases": {"\ud800": ROW}})),
        "a name that is no text", ("'\\ud800'",)),
    "no shape": (row(shape=None), "a shape that is no list", ("v",)),
    "the shape is a number": (row(shape=6), "a shape that is no list", ("v",)),
    "a negative dimension": (row(shape=[-3, 2]), "a shape [-3, 2]", ("v",)),
    "a fraction": (row(shape=[3.0, 2]), "a shape [3.0, 2]", ("v",)),
    "65 dimensions": (row(shape=[1] * 65, strides=[0] * 65), "at most 64", ("v",)),
    "2**124 elements": (row(shape=[BIG, BIG], strides=[0, 0]), "outside of w", ("v",)),
    "none of 2**124 elements": (row(shape=[BIG, 0, BIG], strides=[0, 0, 0]), "outside", ("v",)),
    "no strides": (row(strides=None), "strides that is no list", ("v",)),
    "a stride too few": (row(strides=[1]), "a layout whose parts do not fit", ("v",)),
    "a stride of a text": (row(strides=["1", "3"]), "strides ['1', '3']", ("v",)),
    "a stride of 2**62": (row(shape=[1, 2], strides=[BIG, 1]), "outside of w", ("v",)),
    "a stride of -2**61, of none": (row(shape=[0, 2], strides=[1, -BIG // 2]), "outside", ("v",)),
    "no offset": (row(offset=None), "an offset [None]", ("v",)),
    "a negative offset": (row(offset=-1), "an offset [-1]", ("v",)),
    "an offset that is true": (row(offset=True), "an offset [True]", ("v",)),
    "an element behind": (row(offset=1), "it reads outside of w", ("v",)),
    "a row behind": (row(shape=[3, 3]), "it reads outside of w", ("v",)),
    "an offset of 2**62": (row(offset=BIG), "it reads outside of w", ("v",)),
    "none of them, far behind": (row(shape=[0, 2], offset=7), "it reads outside of w", ("v",)),
    "backwards from too low": (row(shape=[6], strides=[-1], offset=4), "outside of w", ("v",)),
    "backwards to too low": (row(shape=[2, 2], strides=[-6, 1], offset=5), "outside", ("v",)),
    "back and forth": (row(shape=[3, 3], strides=[-2, 2], offset=3), "outside of w", ("v",)),
    "sums that overflow": (
        row(shape=[3, 3], strides=[BIG // 8, BIG // 8], offset=0), "outside of w", ("v",)),
    "bytes behind": (row(shape=[2], strides=[4], offset=17, dtype="F32"), "outside", ("v",)),
    "bytes of a wide dtype": (row(shape=[3], strides=[8], offset=1, dtype="F64"), "out", ("v",)),
    "an unknown dtype": (row(dtype="F31"), "the dtype 'F31'", ("v",)),
    "a dtype of NumPy": (row(dtype="float32"), "the dtype 'float32'", ("v",)),
    "a dtype of less than a byte": (row(dtype="F4"), "the dtype 'F4'", ("v",)),
    "a dtype that is a list": (row(dtype=["F32"]), "the dtype ['F32']", ("v",)),
    "a dtype that is an object": (row(dtype={}), "the dtype {}", ("v",)),
    "conj is a number": (row(conj=1), "a layout whose parts do not fit", ("v",)),
    "conj is a text": (row(conj="true"), "a layout whose parts do not fit", ("v",)),
    "conj of what is real": (row(conj=True), "a sign of F32", ("v",)),
    "conj of real bits": (row(C64, shape=[6], strides=[4], dtype="F32", conj=True),
                          "a sign of F32", ("v",)),
    "neg of what has no sign": (row(BOOL, hostile.DATA[:6], neg=True), "a sign of BOOL", ("v",)),
    "a part of 4-bit elements": (row(F4, b"01", shape=[2], strides=[1]), "outside of w", ("v",)),
    "4-bit elements, transposed": (row(F4, b"01", shape=[2, 2], strides=[1, 2]), "outside", ("v",)),
    "unnamed is a text": (more(unnamed="w"), "storages without a name", ()),
    "unnamed is what is not there": (more(unnamed=["u"]), "storages without a name", ()),
    "unnamed is an alias": (more(unnamed=["v"]), "storages without a name", ()),
    "unnamed of lists": (more(unnamed=[["w"]]), "storages without a name", ()),
    "computed is a list": (more(computed=[]), "no object", ()),
    "computed of what is not there": (more(computed={"c": ["u"]}), "what it is comp", ("c",)),
    "computed of a text": (more(computed={"c": "w"}), "what it is computed from", ("c",)),
    "computed of lists": (more(computed={"c": [["w"]]}), "what it is computed from", ("c",)),
}  # fmt: skip
FILES = {**{f"header: {name}": case for name, case in HEADERS.items()},
         **{f"table: {name}": case for name, case in TABLES.items()}}  # fmt: skip


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
    "a file that is no text": (b'{"weight_map":{"w":"\\ud800"}}', {}, "", ("w",)),
    "a file that is not there": ({"weight_map": {"w": "y"}}, {}, "is not there", ()),
    "a file of 5,000 letters": ({"weight_map": {"w": "y" * 5000}}, {}, "", ()),
    "a tensor that is not there": ({"weight_map": {"u": "x.safetensors"}}, {"x": SOUND},
                                   "the index has it here, the file has not", ("u",)),
    "no tensors": ({"weight_map": {}}, {"x": SOUND}, "", ()),
    "a tensor in two files": ({"weight_map": {"w": "x.safetensors", "u": "y.safetensors"}},
                              {"x": SOUND, "y": file({"u": of("U8", [4], 4), "w":
                               {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, bytes(8))},
                              "", ("w",)),
    "an alias of two files": (
        {"weight_map": {"w": "x.safetensors", "v": "y.safetensors"}},
        {"x": row(), "y": file({"v": W})}, "an alias that is stored too", ("v",)),
    "the index itself": ({"weight_map": {"w": "model.safetensors.index.json"}}, {}, "", ()),
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


def test_a_file_that_becomes_shorter_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(SOUND)
    contents = open_checkpoint(path)
    path.write_bytes(SOUND[:-4])
    with pytest.raises(tied.FileError, match="a file that has become shorter"):
        contents.storages["w"].memory()
