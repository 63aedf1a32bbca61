"""Simulator: predicts the timeline of an offloaded training step before anything is run.

For models and machines that aren't at hand: how long a step takes under each schedule, what
stalls it, and whether it fits. It makes the same ``Timeline`` that the engine measures, from
the same ``ZenFlowConfig`` that the engine takes, and never imports torch.
"""
