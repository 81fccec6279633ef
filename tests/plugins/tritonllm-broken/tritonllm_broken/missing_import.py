"""Needs a package that is not installed."""

import no_such_package_anywhere  # noqa: F401
