"""Reading of a DeepSpeed JSON: what this engine takes from it, what it can't, what it refuses.

DeepSpeed's ZenFlow is the paper's rule, so ``zero_optimization.zenflow`` becomes the preset
``zenflow_paper`` with the file's values (aligned windows, landing a window late, the learning
rate as it is). Without that section ``offload_optimizer`` is the preset ``zero_offload``, and
without both it is ``on_device``. DeepSpeed itself is not needed.
"""
