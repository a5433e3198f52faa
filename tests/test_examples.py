"""The examples run, print what they promise, and check it themselves."""

import subprocess
import sys
from pathlib import Path

import matplotlib.image as mpl_image
import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::UserWarning", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def thread():
    done = run("examples/thread.py")
    assert done.returncode == 0, done.stderr
    return done.stdout


def sections(printed):
    """The lines of each library."""
    found = {}
    for line in printed.splitlines():
        if line in ("numpy", "torch", "jax"):
            lines = found[line] = []
        elif line.startswith("  ") and "tied" in line:
            lines.append(line)
    return found


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_thread(thread, library):
    text = "\n".join(sections(thread)[library])
    for case in (
        "decoder.W = transpose",
        "decoder.W = slice",
        "decoder.W = reshape",
        "last.b = diagonal",
        "V = permute",
        "a dataclass, V = transpose",
        "a class that uses W twice",
    ):
        assert f"{case} " in text
    assert ("a torch module, V = transpose" in text) == (library == "torch")
    assert text.count("tied, same output after f64, f32, f16, ") == text.count("\n")
    assert text.count("not tied, and stays so") == 1


def test_thread_prints_the_report(thread):
    assert "layers.1.W = layers.0.W.T" in thread or "= layers.0.W.T" in thread
    assert thread.endswith("all as it should be\n")


def test_digits(tmp_path):
    picture = tmp_path / "digits.png"
    done = run("examples/digits.py", "--epochs", 4, "--out", picture)
    assert done.returncode == 0, done.stderr
    assert "100%" in done.stderr
    assert "interrupted = uninterrupted, bit for bit, in all 60 steps" in done.stdout
    rows = {
        line[:15].strip(): line[15:].replace(",", "").split()
        for line in done.stdout.splitlines()
        if line[:15].strip() in ("uninterrupted", "interrupted", "tie lost")
    }
    weights, encoder_bias, decoder_bias = 64 * 128 + 128 * 16, 128 + 16, 128 + 64
    tied, lost = weights + encoder_bias + decoder_bias, 2 * weights + encoder_bias + decoder_bias
    assert [rows[name][:2] for name in rows] == [
        [str(tied), str(4 * tied)],
        [str(tied), str(4 * tied)],
        [str(lost), str(4 * lost)],
    ]
    assert rows["interrupted"][2:] == rows["uninterrupted"][2:]
    assert rows["tie lost"][2:] != rows["uninterrupted"][2:]
    height, width, _ = mpl_image.imread(picture).shape
    assert width > height > 500


def test_digits_needs_a_half_way(tmp_path):
    done = run("examples/digits.py", "--epochs", 3, "--out", tmp_path / "digits.png")
    assert done.returncode == 2
    assert "--epochs has to be even" in done.stderr
    assert not list(tmp_path.iterdir())


def test_language_model():
    """The tied model has one matrix less than the untied one, and what it writes is text."""
    done = run("examples/language_model.py", "--steps", 10)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "  head.kernel = embed.weight.T"
    rows = {
        line.split()[0]: line.split()[1:]
        for line in done.stdout.splitlines()
        if line.startswith(("tied ", "untied ")) and "step" not in line
    }
    assert [count for count, _ in rows.values()] == ["111,872", "120,064"]
    assert rows["tied"][1] != rows["untied"][1]
    assert all(3 < float(bits) < 7 for _, bits in rows.values())
    training = [line.split() for line in done.stdout.splitlines() if " step " in line]
    assert [(name, int(count)) for name, _, count, *_ in training] == [
        (name, count) for name in ("tied", "untied") for count in (2, 4, 6, 8, 10)
    ]
    assert "goes on after 'def ':\n\ndef " in done.stdout
