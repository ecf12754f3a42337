"""``python -m roseinfer``."""

import sys

from roseinfer.cli import main

sys.exit(main())
