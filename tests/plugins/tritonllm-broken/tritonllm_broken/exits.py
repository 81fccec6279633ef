"""Ends the process, as a script without its `__main__` guard would."""

raise SystemExit(3)
