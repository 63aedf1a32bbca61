"""Gain by each knob of the update rule: the ablation's record."""

from evidence.paper.shown import shown

STUDY = shown(
    "update_rule",
    "update_rule",
    number=15,
    title="The update rule's ablation",
    minutes=0.1,
    exact=True,
    revision=2,
)
