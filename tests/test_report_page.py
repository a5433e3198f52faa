"""The page of `tied report`: what is in the file. `make report-check` has it in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tied
from report_models import HOSTILE, autoencoder, gpt2, lost, many, random, saved
from tied._checkpoint import open_checkpoint
from tied._cli import page_data
from tied._cli.page import render
from tied._discover import discover
from tied._files.contents import Alias, Checkpoint
from tied._layout import Layout


class Parsed(HTMLParser):
    """A page as a browser takes it apart: elements, and the texts of some."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self._inside: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside[-1]][-1] += data


def data_of(page: str) -> Any:
    return json.loads(Parsed(page).texts["script"][0])


def names_of(data: Any) -> list[str]:
    """The name of each node, as the page puts it together."""
    path: list[str] = []
    names = []
    for depth, word in zip(data["depth"], data["word"], strict=True):
        path[depth:] = [data["words"][word]]
        names.append(".".join(path))
    return names


def nodes(data: Any) -> dict[str, Any]:
    """What is at each name: shape, dtype, bytes, elements."""
    pairs = zip(names_of(data), data["kind"], strict=True)
    return {name: tuple(data["kinds"][kind - 1]) for name, kind in pairs if kind}


def ties(data: Any, what: str = "aliases") -> dict[str, str]:
    names = names_of(data)
    return {
        names[node]: names[of] + how if isinstance(how, str) else f"reads {how[0]}"
        for node, of, how, *_ in data[what]
    }


def facts(page: str) -> list[list[str]]:
    parts = re.findall(r"<dt>(.*?)</dt><dd><b>(.*?)</b> <span>(.*?)</span></dd>", page)
    return [list(part) for part in parts]


def page_of(model: dict[str, Any], folder: Path, search: bool = False) -> str:
    contents = open_checkpoint(saved(model, folder))
    return render(contents, discover(contents) if search else None)


def test_the_names_are_a_tree_and_come_back(tmp_path: Path) -> None:
    data = data_of(page_of(gpt2(2), tmp_path))
    assert names_of(data)[:7] == [
        "lm_head.weight", "transformer", "transformer.h", "transformer.h.0", "transformer.h.0.attn",
        "transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_attn.bias",
    ]  # fmt: skip
    contents = open_checkpoint(tmp_path / "model.safetensors")
    assert sorted(nodes(data)) == sorted(contents.names())
    for name, (shape, dtype, nbytes, elements) in nodes(data).items():
        assert (shape, dtype) == (str(contents.shape(name)), "float32")
        assert nbytes == 4 * elements == 4 * int(np.prod(contents.shape(name)))


def test_numbers_in_names_are_in_order(tmp_path: Path) -> None:
    model = {f"h.{at}.w{other}": random(1) for at in (10, 2, 1) for other in (10, 9)}
    assert list(nodes(data_of(page_of(model, tmp_path)))) == [
        "h.1.w9", "h.1.w10", "h.2.w9", "h.2.w10", "h.10.w9", "h.10.w10",
    ]  # fmt: skip


def test_ties_are_told_as_a_person_writes_them(tmp_path: Path) -> None:
    data = data_of(page_of(autoencoder(), tmp_path))
    assert ties(data) == {f"decoder.{2 - at}.weight": f"encoder.{at}.weight.T" for at in range(3)}
    assert data["missed"] is True
    assert data["lost"] is None
    base = random(12)
    data = data_of(page_of({"a": base[:6], "b": base[4:]}, tmp_path))
    assert ties(data) == {"a": "reads elements 0 to 5", "b": "reads elements 4 to 11"}
    assert [names_of(data)[node] for node in data["spans"]] == ["a.tied_span"]


def test_lost_ties_are_apart_from_ties(tmp_path: Path) -> None:
    data = data_of(page_of(lost(), tmp_path, search=True))
    assert ties(data) == {"head.weight": "embed.weight.T"}
    assert ties(data, "lost") == {"old.weight": "embed.weight.T", "rows": "embed.weight[:20]"}
    assert [entry[3] for entry in data["lost"]] == ["transposed", "block"]


def test_what_is_computed_names_its_sources(tmp_path: Path) -> None:
    contents = open_checkpoint(saved({"a": random(3), "b": random(3), "c.d": random(2)}, tmp_path))
    contents.computed = {"c.both": ("a", "b"), "one": ("a",)}
    data = data_of(render(contents))
    names = names_of(data)
    told = {names[node]: [names[source] for source in of] for node, of in data["computed"]}
    assert told == {"c.both": ["a", "b"], "one": ["a"]}
    assert "c.both" in names
    assert "c.both" not in nodes(data)


def test_an_expanded_file_misses_nothing(tmp_path: Path) -> None:
    tied.save(autoencoder(), tmp_path / "all.safetensors", expand=True)
    page = render(open_checkpoint(tmp_path / "all.safetensors"))
    assert data_of(page)["missed"] == []
    assert facts(page)[1:] == [
        ["Bytes stored", "21.66 KiB", "11.16 KiB of them unique"],
        ["If every name were written", "21.66 KiB", "12 names"],
        ["A loader that knows no ties", "misses nothing", "every name has its tensor"],
    ]


def test_the_summary(tmp_path: Path) -> None:
    assert facts(page_of(lost(), tmp_path, search=True)) == [
        ["Parameters", "808", "1,128 if every name counts"],
        ["Bytes stored", "3.16 KiB", "in 4 storages"],
        ["If every name were written", "4.41 KiB", "5 names"],
        ["A loader that knows no ties", "misses 1 name", "head.weight"],
        ["Lost ties", "2", "1.88 KiB stored twice"],
    ]
    np.savez(tmp_path / "plain.npz", a=random(3))
    contents = open_checkpoint(tmp_path / "plain.npz")
    assert facts(render(contents, discover(contents))) == [
        ["Parameters", "3", "each storage counted once"],
        ["Bytes stored", "12 B", "in 1 storage"],
        ["If every name were written", "12 B", "1 name"],
        ["Lost ties", "none", "no array has the values of another one"],
    ]
    base = random(9)
    model = {"w": base} | {f"t{at}": base for at in range(6)}
    assert facts(page_of(model, tmp_path))[3][1:] == ["misses 6 names", "t0, t1, t2, t3 and 2 more"]


def test_files_are_told_where_there_are_several(tmp_path: Path) -> None:
    assert data_of(page_of(autoencoder(), tmp_path))["file"] == []
    tied.save(autoencoder(), tmp_path / "shards", max_shard_bytes=4096)
    contents = open_checkpoint(tmp_path / "shards")
    data = data_of(render(contents))
    pairs = zip(names_of(data), data["kind"], data["file"], strict=True)
    told = {name: data["files"][file] for name, kind, file in pairs if kind}
    stored = {name: contents.storages[contents.source(name)].file for name in contents.names()}
    assert told == {name: file.name for name, file in stored.items() if file is not None}
    assert len(set(told.values())) > 1


def test_hostile_names_stay_data(tmp_path: Path) -> None:
    plain, page = page_of({"w": random(2)}, tmp_path), page_of(
        {name: random(3) for name in HOSTILE}, tmp_path
    )  # fmt: skip
    assert Parsed(page).tags == Parsed(plain).tags
    assert sorted(nodes(data_of(page))) == sorted(HOSTILE)
    text = page[page.index('id="data">') : page.index("</script>")]
    assert text.isascii()
    assert not set("<>&") & set(text.removeprefix('id="data">'))
    for bad in ("onerror", "document.title", "\u202e", "\u2028", "\x1b"):
        assert bad not in page.replace(text, "")


def test_a_hostile_file_name_stays_text(tmp_path: Path) -> None:
    source = saved({"w": random(2)}, tmp_path)
    hostile = tmp_path / "<b>&{{data}}\u202e\udcff\"'.safetensors"
    shutil.copy(source, hostile)
    page = render(open_checkpoint(hostile))
    page.encode("utf-8")
    assert Parsed(page).tags == Parsed(render(open_checkpoint(source))).tags
    name = "<b>&{{data}}\\u202e\\udcff\"'.safetensors"
    assert Parsed(page).texts["bdi"] == [name]
    assert Parsed(page).texts["title"] == [f"{name} · tied"]


def test_lone_surrogates_and_missed_names_are_spelled_out(tmp_path: Path) -> None:
    contents = open_checkpoint(saved({"w": random(2)}, tmp_path))
    stored = contents.storages["w"]
    odd = "\ud800<b>"
    alias = Alias(odd, "w", Layout.whole(stored.shape))
    odd_one = Checkpoint(contents.path, "safetensors", {"w": stored}, {odd: alias},
                         files=contents.files)  # fmt: skip
    page = render(odd_one)
    page.encode("utf-8")
    assert facts(page)[3] == ["A loader that knows no ties", "misses 1 name", "\\ud800&lt;b&gt;"]
    assert odd in nodes(data_of(page))


def test_it_asks_for_nothing_and_runs_nothing_else(tmp_path: Path) -> None:
    page = page_of(gpt2(1), tmp_path)
    parsed = Parsed(page)
    assert [
        name for name, _ in parsed.attributes if name in ("src", "href", "srcset", "action")
    ] == []
    assert [name for name, _ in parsed.attributes if name.startswith("on") or name == "style"] == []
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|@font-face|fetch\(|XMLHttpRequest|innerHTML|eval\(", page)
    (style,), (_, script) = parsed.texts["style"], parsed.texts["script"]
    policy = dict(parsed.attributes)["content"]
    policies = [value for name, value in parsed.attributes if value and "default-src" in value]
    assert policy is not None
    assert policies == [
        f"default-src 'none'; script-src {hashed(script)}; style-src {hashed(style)}; "
        "base-uri 'none'; form-action 'none'"
    ]


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_same_file_gives_the_same_page(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = saved(lost(), tmp_path)
    shutil.copy(path, tmp_path / "elsewhere" / path.name)
    one, other = (open_checkpoint(p) for p in (path, tmp_path / "elsewhere" / path.name))
    page = render(one, discover(one))
    assert page == render(other, discover(other))
    assert str(tmp_path) not in page


def test_many_names_are_few_bytes(tmp_path: Path) -> None:
    small, large = (tmp_path / name for name in ("small", "large"))
    sizes = []
    for folder, experts in ((small, 10), (large, 500)):
        folder.mkdir()
        sizes.append(len(page_of(many(4, experts), folder)))
    assert (sizes[1] - sizes[0]) / (4 * 490 * 3) < 14
    assert sizes[0] < 64 << 10


def test_depth_and_width_of_names_have_no_end(tmp_path: Path) -> None:
    names = [".".join("a" * depth) for depth in range(1, 1200)]
    data = data_of(page_of({name: random(1) for name in names}, tmp_path))
    assert list(nodes(data)) == names
    assert data["depth"] == list(range(1199))


def test_how_is_cut_where_it_is_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "reads", lambda contents, name: "w" + "[0]" * 10_000)
    base = random(4, 3)
    how = ties(data_of(page_of({"w": base, "v": base.T}, tmp_path)))["v"]
    assert how == ("w" + "[0]" * 10_000)[:401] + "..."


def test_all_parts_of_the_page_are_in_the_package() -> None:
    there = {file.name for file in files("tied._cli").joinpath("web").iterdir()}
    page = Path(str(files("tied._cli").joinpath("page.py"))).read_text(encoding="utf-8")
    assert there == set(re.findall(r'"(\w+\.(?:js|css|html))"', page))


PAIRS = [
    ("ink", "paper", 7), ("quiet", "paper", 4.5), ("quiet", "raised", 4.5), ("quiet", "wash", 4.5),
    ("ink", "wash", 7), ("tie", "paper", 4.5), ("tie", "wash", 4.5), ("tie", "raised", 4.5),
    ("lost", "paper", 4.5), ("lost", "wash", 4.5), ("lost", "raised", 4.5), ("edge", "paper", 3),
    ("ink", "block", 4.5), ("ink", "block-2", 4.5), ("ink", "block-3", 4.5),
    ("ink", "tie-block", 4.5), ("ink", "lost-block", 4.5),
]  # fmt: skip


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("text", "ground", "least"), PAIRS)
def test_contrast(text: str, ground: str, least: float, theme: int) -> None:
    style = files("tied._cli").joinpath("web", "page.css").read_text(encoding="utf-8")
    colours = {
        name: both for name, *both in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", style)
    }
    high, low = sorted((luminance(colours[name][theme]) for name in (text, ground)), reverse=True)
    assert (high + 0.05) / (low + 0.05) >= least


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))
