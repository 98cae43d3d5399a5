"""`python -m megatrain`: see megatrain/cli.py."""

import sys

from megatrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
