"""``python -m roseinfer.benchmark_streaming``."""

import sys

from roseinfer.bench.serving.streaming_bench import main

if __name__ == "__main__":
    sys.exit(main())
