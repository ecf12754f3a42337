"""``python -m pytest_roseinfer.mutants``, which ``roseinfer mutants`` is short for."""

from __future__ import annotations

import sys

from pytest_roseinfer.mutants.command import main

if __name__ == "__main__":
    sys.exit(main())
