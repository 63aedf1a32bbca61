"""Decisions for runs under test: written down as changes, or drawn."""

import dataclasses

from hypothesis import strategies as st

from zenflow import Knobs


def decisions(config, changes):
    """Return a decision log from pairs (step, changed knobs), each on top of those before."""
    knobs, log = Knobs.of(config), []
    for step, changed in changes:
        knobs = dataclasses.replace(knobs, **changed)
        log.append((step, knobs))
    return log


def intervals(config, changes):
    """Return a decision log from pairs (step, S)."""
    return decisions(config, [(step, {"update_interval": interval}) for step, interval in changes])


@st.composite
def schedules(draw, config, *, last, max_size=3, steps=None):
    """Draw a decision log: at some steps up to `last`, some knobs change."""
    possible = {
        "update_interval": st.integers(1, 6),
        "select_interval": st.integers(0, 6),
    }
    if 0 < config.topk_ratio < 1:
        possible["topk_ratio"] = st.sampled_from([0.05, 0.1, 0.25, 0.5, 0.8, 0.99])
    changes = st.fixed_dictionaries({}, optional=possible)
    drawn = draw(st.dictionaries(steps or st.integers(1, last), changes, max_size=max_size))
    return decisions(config, sorted(drawn.items()))
