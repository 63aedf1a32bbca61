"""Even the weights of tiny layers are streamed."""

import pytest


@pytest.fixture(autouse=True)
def tiny_layers(monkeypatch):
    monkeypatch.setattr("zenflow.streaming.layers.LEAST_ELEMENTS", 100)
