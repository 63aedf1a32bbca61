"""Tests of Triton's kernels, which conftest.py lets Triton interpret where there is no GPU."""

import importlib.util

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton"
)
