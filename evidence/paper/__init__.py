"""Figures of the ZenFlow paper that training makes; `experiments.paper` has those of speed."""
