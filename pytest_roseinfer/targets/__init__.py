"""Adapters that ship with the plugin."""
