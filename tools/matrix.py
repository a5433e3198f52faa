"""Writes the survival matrices: which ties operations keep, by themselves and after `tied.tie`.

docs/matrix.md is PyTorch's, docs/matrix-jax.md that of JAX and the libraries over it.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]


def main() -> int:
    """Returns the exit status of the tool that writes the table of Hugging Face's models."""
    import conftest  # noqa: F401 - JAX's settings, before JAX is loaded
    import jax_cells
    import jax_page
    import matrix_page
    import torch_cells

    for page, cells in ((matrix_page, torch_cells), (jax_page, jax_cells)):
        page.PAGE.write_text(page.render(cells.all_cells()), encoding="utf-8")
        print("wrote", page.PAGE.relative_to(ROOT))
    return subprocess.call([sys.executable, str(ROOT / "tools" / "transformers_ties.py")])


if __name__ == "__main__":
    sys.exit(main())
