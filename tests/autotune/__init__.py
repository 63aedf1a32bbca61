"""Tests of the tuner."""
