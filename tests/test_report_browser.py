"""The page of `tied report` in a headless Chromium: pointer, keyboard, themes, sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Page, browser
from report_models import HOSTILE, autoencoder, gpt2, lost, many, random, saved
from report_pages import Shown, active, background, lines, rows, to_tree
from tied._checkpoint import open_checkpoint
from tied._cli.page import render

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def shown(chromium: Page, tmp_path: Path) -> Iterator[Shown]:
    made = Shown(chromium, tmp_path)
    chromium.run("try { localStorage.clear() } catch {}")
    yield made
    assert chromium.complaints() == []
    assert chromium.requests() == [(tmp_path / "ties.html").as_uri()]


def test_the_model_is_a_tree(shown: Shown) -> None:
    page = shown(autoencoder())
    assert rows(page)[:5] == [
        "v decoder, 6 names, 448 B",
        " v 0, 2 names, 64 B",
        "  bias, (16,), float32, 64 B",
        "  weight, (8, 16), float32, =\u00a0encoder.2.weight.T, "
        "missed by a loader that knows no ties",
        " v 1, 2 names, 128 B",
    ]
    assert rows(page)[-1] == "  weight, (16, 8), float32, 512 B, read by 1 other name"
    assert page.texts("#found") == ["12 names"]


def test_a_large_model_is_folded_at_first(shown: Shown) -> None:
    page = shown(gpt2(), height=1400)
    assert rows(page)[:4] == [
        "lm_head.weight, (1571, 48), float32, =\u00a0transformer.wte.weight, "
        "missed by a loader that knows no ties",
        "v transformer, 148 names, 1.59 MiB",
        " v h, 144 names, 1.29 MiB",
        "  > 0, 12 names, 110.44 KiB",
    ]
    page.pointer("#unfold")
    assert page.run("document.getElementById('tree').offsetHeight") == 28 * 260
    page.pointer("#fold")
    assert len(rows(page)) == 2


def test_ties_are_lines_between_rows_and_arcs(shown: Shown) -> None:
    page = shown(lost(), search=True)
    assert lines(page) == ["lost 3", "tie 2"]
    arcs = page.run("[...document.querySelectorAll('.arc')].map(a => a.getAttribute('class'))")
    assert sorted(arcs) == ["arc lost", "arc lost", "arc tie"]
    titles = page.texts(".arc title")
    assert sorted(titles) == [
        "head.weight =\u00a0embed.weight.T", "old.weight ≈\u00a0embed.weight.T",
        "rows ≈\u00a0embed.weight[:20]",
    ]  # fmt: skip
    page.pointer(".row.alias", click=False)
    assert lines(page) == ["lost off 3", "tie on 2"]
    assert page.run("document.querySelectorAll('.row.with').length") == 2
    page.pointer(".row.alias")
    assert page.texts("#panel h2, #panel h3, #panel li") == [
        "head.weight", "Reads", "embed.weight=\u00a0embed.weight.T",
    ]  # fmt: skip


def test_folded_ends_of_a_tie_are_one_line(shown: Shown) -> None:
    page = shown(autoencoder())
    assert lines(page) == ["tie 2"] * 3
    page.pointer("#fold")
    assert rows(page) == ["> decoder, 6 names, 448 B", "> encoder, 6 names, 10.72 KiB"]
    assert lines(page) == ["tie 2"]


def test_what_is_computed_is_dotted(shown: Shown) -> None:
    contents = open_checkpoint(saved({"a": random(3), "b": random(3)}, shown.folder))
    contents.computed = {"both": ("a", "b")}
    path = shown.folder / "ties.html"
    path.write_text(render(contents), encoding="utf-8")
    shown.page.show(path)
    assert lines(shown.page) == ["computed 2", "computed 2"]
    assert rows(shown.page)[2] == "both, computed from a, b"


def test_widths_are_bytes(shown: Shown) -> None:
    page = shown(gpt2())
    boxes = page.run("""[...document.querySelectorAll(".box")].map(box =>
        [box.querySelector("title").textContent.split("\\n")[0],
         Number(box.querySelector("rect").getAttribute("width"))])""")
    widths = dict(boxes)
    room = page.run("document.getElementById('map').clientWidth")
    contents = open_checkpoint(shown.folder / "model.safetensors")
    for name in ("transformer.wte.weight", "transformer.h.3"):
        nbytes = sum(
            s.nbytes for n, s in contents.storages.items() if (n + ".").startswith(name + ".")
        )
        assert abs(widths[name] - room * nbytes / contents.nbytes) < 1.5


def test_the_keys_of_a_tree(shown: Shown) -> None:
    page = shown(gpt2())
    to_tree(page)
    assert active(page) == "lm_head.weight"
    page.press("ArrowDown")
    assert active(page) == "transformer"
    page.press("ArrowDown", "ArrowDown")
    assert active(page) == "0"
    page.press("ArrowRight")
    assert "  v 0, 12 names, 110.44 KiB" in rows(page)
    page.press("ArrowRight")
    assert active(page) == "attn"
    page.press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight")
    assert active(page) == "bias"
    page.press("ArrowRight")
    assert active(page) == "bias"
    page.press("ArrowLeft")
    assert active(page) == "c_attn"
    page.press("ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert active(page) == "0"
    page.press("ArrowLeft")
    assert "  > 0, 12 names, 110.44 KiB" in rows(page)
    page.press("*")
    assert (
        page.run("document.querySelectorAll('[aria-level=\"3\"][aria-expanded=true]').length") > 3
    )
    page.press("End")
    assert active(page) == "wte.weight"
    page.press("ArrowDown")
    assert active(page) == "wte.weight"
    page.press("Enter")
    assert active(page) == "lm_head.weight"
    page.press("Enter")
    assert active(page) == "wte.weight"
    page.press("Home", "ArrowUp")
    assert active(page) == "lm_head.weight"
    page.press("PageDown")
    assert active(page) not in ("lm_head.weight", "transformer")
    page.press("Home", "w", "t")
    assert active(page) == "wte.weight"
    page.press("Escape")
    assert active(page) == ""
    assert page.texts("#panel h2") == ["Ties"]


def test_the_active_row_is_seen(shown: Shown) -> None:
    page = shown(gpt2(), height=500)
    to_tree(page)
    page.press("*", *["ArrowDown"] * 30)
    box, under = (
        page.run("""[document.querySelector(".row.active").getBoundingClientRect().toJSON(),
        document.getElementById("tools").getBoundingClientRect().bottom]""")
    )
    assert under <= box["top"] < box["bottom"] <= 500
    assert page.run("getComputedStyle(document.querySelector('.row.active')).boxShadow") != "none"
    page.press("Home")
    box = page.run("document.querySelector('.row.active').getBoundingClientRect().toJSON()")
    assert box["top"] >= page.run("document.getElementById('tools').getBoundingClientRect().bottom")


def test_search_filters_as_one_types(shown: Shown) -> None:
    page = shown(gpt2())
    page.press("/")
    assert page.run("document.activeElement.id") == "search"
    page.press(*"C_FC we")
    assert page.texts("#found") == ["12 found"]
    assert [row.strip() for row in rows(page)[:6]] == [
        "v transformer, 148 names, 1.59 MiB", "v h, 144 names, 1.29 MiB",
        "v 0, 12 names, 110.44 KiB", "v mlp, 4 names, 72.94 KiB", "v c_fc, 2 names, 36.75 KiB",
        "weight, (48, 192), float32, 36.00 KiB",
    ]  # fmt: skip
    assert page.texts(".row mark")[:2] == ["we", "we"]
    page.press("Enter")
    assert active(page) == "weight"
    assert page.texts("#panel h2") == ["transformer.h.0.mlp.c_fc.weight"]
    page.press("/")
    page.press("Escape")
    assert page.run("document.getElementById('search').value") == ""
    assert page.texts("#found") == ["149 names"]
    page.press("Escape")
    assert page.run("document.activeElement.id") == "tree"
    page.press("/", *"nothing of this")
    assert page.texts("#found") == ["0 found"]
    assert rows(page) == []


def test_filters(shown: Shown) -> None:
    page = shown(lost(), search=True)
    assert page.texts("#filters button") == ["All 5", "Tied 2", "Lost 3", "Missed 1"]
    page.pointer("[data-filter=tied]")
    assert [row.split(",")[0] for row in rows(page)] == ["embed.weight", "head.weight"]
    page.pointer("[data-filter=lost]")
    assert [row.split(",")[0] for row in rows(page)] == ["embed.weight", "old.weight", "rows"]
    assert rows(page)[1] == (
        "old.weight, (8, 40), float32, 1.25 KiB, ≈\u00a0embed.weight.T, a lost tie?"
    )
    page.pointer("[data-filter=all]")
    assert len(rows(page)) == 5


def test_the_panel_leads_to_what_is_tied(shown: Shown) -> None:
    page = shown(gpt2())
    page.pointer("#fold")
    page.pointer("#panel .way")
    assert active(page) == "lm_head.weight"
    page.pointer("#panel .way")
    assert active(page) == "wte.weight"
    assert page.texts("#panel h3, #panel li") == [
        "Read by", "lm_head.weight=\u00a0transformer.wte.weight",
    ]  # fmt: skip


def test_one_branch_can_be_drawn_alone(shown: Shown) -> None:
    page = shown(gpt2())
    to_tree(page)
    page.press("ArrowDown", "ArrowDown", "ArrowDown", "z")
    assert page.texts("#crumbs > *") == ["All", "transformer", "h", "0"]
    assert page.texts(".box title")[0].startswith("transformer.h.0.attn\n")
    page.press("z")
    assert page.texts("#crumbs > *") == []


def test_light_and_dark(shown: Shown) -> None:
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 27)"
    page = shown(autoencoder())
    assert background(page) == light
    page = shown(autoencoder(), dark=True)
    assert background(page) == dark
    page.press("Tab", "Enter")
    assert (page.texts("#theme"), background(page)) == (["Theme: light"], light)
    page.press("Enter")
    assert (page.texts("#theme"), background(page)) == (["Theme: dark"], dark)
    page = shown(autoencoder())
    assert (page.texts("#theme"), background(page)) == (["Theme: dark"], dark)
    page.pointer("#theme")
    assert (page.texts("#theme"), background(page)) == (["Theme: system"], light)


def test_all_that_takes_the_focus_has_a_name_and_shows_it(shown: Shown) -> None:
    page = shown(lost(), search=True)
    seen = []
    for _ in range(40):
        page.press("Tab")
        if page.run("document.activeElement === document.body"):
            break
        seen.append(page.run("document.activeElement.id || document.activeElement.textContent"))
        ring = """(() => { const at = document.activeElement;
            return at.id === "tree" ? getComputedStyle(at.querySelector(".active")).boxShadow
                : getComputedStyle(at).outlineStyle; })()"""
        assert page.run(ring) not in ("", "none"), seen[-1]
    assert seen[:8] == [
        "theme", "search", "All 5", "Tied 2", "Lost 3", "Missed 1", "unfold", "fold",
    ]  # fmt: skip
    assert seen[8] == "tree"
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "searchbox", "tree", "treeitem", "image", "textbox")
    told = [node for node in tree if not node["ignored"] and node["role"]["value"] in roles]
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in told]
    assert ("tree", "Names of the model") in named
    assert ("searchbox", "Search names") in named
    assert [role for role, name in named if not name] == []
    assert len([role for role, _ in named if role == "treeitem"]) == 5


def test_hostile_names_are_only_text(shown: Shown) -> None:
    page = shown({name: random(2, at + 3) for at, name in enumerate(HOSTILE)}, height=1200)
    assert page.run("document.title") == "model.safetensors · tied"
    assert page.run("document.querySelectorAll('img, script').length") == 2
    told = page.texts(".row bdi")
    assert "</script><script>document.title='broken'</script>" in told
    assert "a\\u{202e}gnp.exe" in told
    assert "line\\u{a}break\\u{9}\\u{1b}[31m" in told
    assert "\\u{2028}\\u{2029}" in told
    assert max(map(len, told)) <= 301
    for _ in range(len(HOSTILE)):
        page.press("/", "ArrowDown", "ArrowDown")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    page.press("/", *"<img")
    assert page.texts("#found") == ["1 found"]


def test_many_names_stay_few_rows(shown: Shown) -> None:
    page = shown(many(20, 500))
    code = """(() => { const start = performance.now();
        %s; document.body.offsetHeight; return performance.now() - start; })()"""
    took = page.run(code % "document.getElementById('unfold').click()")
    assert took < 2000
    assert page.run("document.querySelectorAll('.row').length") < 80
    assert page.run("document.getElementById('tree').offsetHeight") == 28 * 40024
    page.run("scrollTo(0, 500000)")
    page.settle()
    assert 20 < page.run("document.querySelectorAll('.row').length") < 80
    seen = page.run("document.elementFromPoint(200, 450).closest('.row') !== null")
    assert seen
    page.run("document.getElementById('search').focus()")
    page.press(*"experts.499 up")
    assert page.texts("#found") == ["20 found"]


@pytest.mark.parametrize("width", [320, 420, 760, 1000])
def test_narrow_windows(shown: Shown, width: int) -> None:
    page = shown(lost(), search=True, width=width, height=700)
    assert page.run("document.documentElement.scrollWidth") == width
    page.pointer(".row")
    assert page.run("document.documentElement.scrollWidth") == width
    top, bottom = page.run("""[document.querySelector("#panel").getBoundingClientRect().top,
        document.querySelector(".row.active").getBoundingClientRect().bottom]""")
    assert bottom <= top
    page.pointer("#panel .close")
    assert page.texts("#panel h2") == ["Ties"]


def test_print(shown: Shown) -> None:
    page = shown(gpt2(), dark=True)
    page.pointer("#unfold")
    page.call("Emulation.setEmulatedMedia", media="print")
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.run("document.querySelectorAll('.row').length") == 260
    assert background(page) == "rgb(255, 255, 255)"
    assert page.run("getComputedStyle(document.getElementById('tools')).display") == "none"
    tops = page.run(
        "[...document.querySelectorAll('.row')].map(r => r.getBoundingClientRect().top)"
    )
    assert tops == sorted(tops)
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.run("document.querySelectorAll('.row').length") < 80
    page.print_to(shown.folder / "ties.pdf")
    assert (shown.folder / "ties.pdf").read_bytes().count(b"/Type /Page\n") in range(2, 8)


def test_without_ties(shown: Shown) -> None:
    page = shown({"a": random(3), "b.c": random(2)})
    assert page.texts("#panel p") == [
        "No ties are recorded. tied report --discover looks for those that were lost."
    ]
    assert lines(page) == []
    page = shown({}, search=True)
    assert rows(page) == []
    assert json.loads(page.texts("#data")[0])["word"] == []


def test_of_many_ties_those_of_the_rows_that_are_seen_are_drawn(shown: Shown) -> None:
    model: dict[str, Any] = {}
    for at in range(600):
        model[f"a.{at}.w"] = model[f"z.{at}.w"] = random(2, 2)
    page = shown(model)
    page.pointer("#unfold")
    page.run("scrollTo(0, 8000)")
    page.settle()
    assert len(rows(page)) > 40
    assert len(lines(page)) >= len(rows(page)) - 2
    assert page.run("document.querySelectorAll('.arc').length") < 120


def test_what_is_folded_away_gives_the_keys_to_its_branch(shown: Shown) -> None:
    page = shown(gpt2())
    to_tree(page)
    page.press("End")
    assert page.texts("#panel h2") == ["transformer.wte.weight"]
    page.run("document.getElementById('fold').click()")
    assert active(page) == "transformer"
    assert page.texts("#panel h2") == ["transformer"]


def test_rows_that_are_left_out_are_told(shown: Shown) -> None:
    page = shown({f"w{at}": random(1) for at in range(3010)})
    assert page.texts("#cut:not([hidden])") == []
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.texts("#cut:not([hidden])") == ["10 more rows are not here: search, or fold."]
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.texts("#cut:not([hidden])") == []


def test_deep_names_are_indented_within_the_window(shown: Shown) -> None:
    page = shown({".".join("abcdefghijklmnopqrstuvwxyz"[:n]): random(n) for n in range(1, 27)},
                 width=420)  # fmt: skip
    edges = """[...document.querySelectorAll(".row")].map(row =>
        row.querySelector("bdi").getBoundingClientRect().right <=
        row.querySelector(".bytes").getBoundingClientRect().left)"""
    assert page.run(edges) == [True] * len(rows(page))
    assert len(rows(page)) == 26


def test_a_storage_that_is_computed_too_keeps_its_bytes(shown: Shown) -> None:
    contents = open_checkpoint(saved({"a": random(3), "b": random(3)}, shown.folder))
    contents.computed = {"b": ("a",)}
    path = shown.folder / "ties.html"
    path.write_text(render(contents), encoding="utf-8")
    shown.page.show(path)
    assert rows(shown.page)[1] == "b, (3,), float32, 12 B, computed from a"
