"""Caches of other projects, held to the harness; ``fetch`` brings the projects here."""
