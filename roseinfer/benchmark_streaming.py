"""``python -m roseinfer.benchmark_streaming``."""

import sys

from roseinfer.bench.command import benchmark_streaming as main

if __name__ == "__main__":
    sys.exit(main())
