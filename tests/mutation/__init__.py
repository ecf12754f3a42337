"""Mutation score: mutants that mutmut generates, searched by the shipped suite, then by unit tests.

``tests/mutants`` plants bugs that people wrote. Here nobody chooses what is wrong: ``generation``
draws from all mutants of some folders, ``planting`` puts one into a fork of a process that has
imported everything, and ``attempts`` runs what executes its statement, as ``recording`` found it.
"""
