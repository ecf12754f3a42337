"""Proof that the harness finds bugs: planted ones, and a runner that shows each is caught.

``roseinfer mutants`` plants every bug of the catalogue in a copy of the cache's sources and
searches the copy as a user's run would. ``mutant`` says what a planted bug is,
``catalogue`` lists them, ``install`` makes the broken copies, ``hunt`` searches one,
``baseline`` is what the search is compared with, ``worker`` and ``runner`` do it in parallel,
``report`` writes it down.
"""
