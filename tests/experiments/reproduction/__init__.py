"""Tests of the paper's figures and of their frame."""
