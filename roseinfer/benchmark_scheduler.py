"""``python -m roseinfer.benchmark_scheduler``."""

import sys

from roseinfer.bench.command import benchmark_scheduler as main

if __name__ == "__main__":
    sys.exit(main())
