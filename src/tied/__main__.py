"""`python -m tied` is the command `tied`."""

import sys

from tied._cli import main

if __name__ == "__main__":
    sys.exit(main())
