"""Extents of a few rows."""

import pytest

from zenflow.drive import extents


@pytest.fixture(autouse=True)
def small_extents(monkeypatch):
    """Cut even tiny blocks into several extents."""
    monkeypatch.setattr(extents, "EXTENT_ELEMENTS", 60)
