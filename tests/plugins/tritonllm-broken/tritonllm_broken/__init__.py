"""Plugins that fail, each in its own way."""
