"""`python -m seedance`: the same as `seedance`, where only the source is at hand."""

import sys

from seedance.cli import main

if __name__ == "__main__":
    sys.exit(main())
