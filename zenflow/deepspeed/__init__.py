"""Reading of a DeepSpeed JSON into this engine's settings.

DeepSpeed's ZenFlow is the paper's rule, so ``zero_optimization.zenflow`` becomes the preset
``zenflow_paper`` with the file's values (aligned windows, landing a window late, the learning
rate as it is). Without that section ``offload_optimizer`` is the preset ``zero_offload``, and
without both it is ``on_device``. DeepSpeed itself is not needed.
"""
