"""Proof that the harness finds bugs: planted bugs, and a runner that searches for each.

``python -m tests.mutants`` plants every bug of the catalogue in a copy of the engine's sources
and searches the copy as a user's run would. ``mutant`` defines a planted bug, ``catalogue`` lists
them, ``install`` makes the broken copies, and ``hunt`` searches one. ``random_operations``,
``random_requests``, ``examples`` and ``engine_examples`` are the baselines of the search.
``worker`` and ``runner`` run searches in parallel; ``report`` formats the results.
"""
