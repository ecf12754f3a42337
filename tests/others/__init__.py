"""Caches and engines of other projects, held to the harness; ``fetch`` brings the projects here."""
