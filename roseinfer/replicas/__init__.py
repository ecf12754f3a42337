"""Replicas of the server on Ray Serve: ``roseinfer serve --replicas N``."""
