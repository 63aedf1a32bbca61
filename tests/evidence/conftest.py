"""Fixtures that tests of runs have too."""

from tests.experiments.conftest import blank_pictures, library_read_once, versions_once

__all__ = ["blank_pictures", "library_read_once", "versions_once"]
