"""``python -m roseinfer.benchmark_scheduler``."""

import sys

from roseinfer.bench.serving.commands import benchmark_scheduler as main

if __name__ == "__main__":
    sys.exit(main())
