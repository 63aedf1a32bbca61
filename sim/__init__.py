"""Simulator: predicts the timeline of an offloaded training step before anything is run.

For models and machines that aren't at hand: how long a step takes under each schedule, what stalls
it, and whether it fits. Predictions are the ``Timeline`` that the engine measures, from the
``ZenFlowConfig`` that the engine takes. The package never imports torch.

Examples:
    How much of a step does the device stand still, when a 7B model's states are on the host?

    >>> from sim.hardware.catalog import find_machine
    >>> from sim.models.table import find_model
    >>> from sim.models.workload import Workload
    >>> from sim.simulate import Strategy, simulate
    >>> from sim.timing.costs import costs_of
    >>> workload = Workload.of_config(*find_model("llama-2-7b"), batch_size=8, checkpointing=True)
    >>> costs = costs_of(workload, find_machine("dgx-a100-80", 1))
    >>> for name in ("zero_offload", "zenflow"):
    ...     print(f"{name}: {simulate(costs, Strategy.of(name)).stall_fraction:.0%}")
    zero_offload: 44%
    zenflow: 0%
"""
