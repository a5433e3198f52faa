"""Writes docs/matrix.md: which ties PyTorch's operations keep, by itself and after `tied.tie`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]


def main() -> int:
    """Returns the exit status of the tool that writes the table of Hugging Face's models."""
    import matrix_page
    import torch_cells

    matrix_page.PAGE.write_text(matrix_page.render(torch_cells.all_cells()), encoding="utf-8")
    print("wrote", matrix_page.PAGE.relative_to(ROOT))
    return subprocess.call([sys.executable, str(ROOT / "tools" / "transformers_ties.py")])


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
