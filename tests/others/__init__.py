"""Caches and engines of other projects under the harness; ``fetch`` downloads the projects."""
