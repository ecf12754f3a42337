"""Real models, from packages that bring GGUF files.

``pytest -n 2 --dist loadgroup tests/real_models`` runs all of it, and shows figures at its
end. Tests that are not marked ``slow`` run in the ordinary suite, where the packages are installed.
"""
