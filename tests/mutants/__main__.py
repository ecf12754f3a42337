"""``python -m tests.mutants``: plant the bugs and search for them."""

from __future__ import annotations

import sys

from tests.mutants.command import main

if __name__ == "__main__":
    sys.exit(main())
