"""``python -m roseinfer.benchmark_scheduler``."""

import sys

from roseinfer.bench.serving.scheduler_bench import main

if __name__ == "__main__":
    sys.exit(main())
