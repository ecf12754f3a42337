"""Proof that the harness finds bugs: planted ones, and a runner that shows each is caught.

``python -m tests.mutants`` plants every bug of the catalogue in a copy of the engine's sources
and searches the copy as a user's run would. ``mutant`` says what a planted bug is, ``catalogue``
lists them, ``install`` makes the broken copies, and ``hunt`` searches one. ``random_operations``,
``random_requests``, ``examples`` and ``engine_examples`` are what the search is compared with.
``worker`` and ``runner`` do all that in parallel; ``report`` writes it down.
"""
