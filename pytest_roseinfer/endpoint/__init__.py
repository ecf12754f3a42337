"""Tests of running servers over HTTP, against their own completions of each request alone."""
