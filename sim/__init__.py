"""Simulator: predicts the timeline of an offloaded training step before anything is run.

For models and machines that aren't at hand: how long a step takes under each schedule, what
stalls it, and whether it fits. It makes the same ``Timeline`` that the engine measures, from
the same ``ZenFlowConfig`` that the engine takes, and never imports torch.

>>> from sim.hardware.catalog import find_machine
>>> from sim.timing.costs import costs_of
>>> from sim.models.table import find_model
>>> from sim.simulate import Strategy, simulate
>>> from sim.models.workload import Workload
>>> workload = Workload.of_config(*find_model("llama-2-7b"), batch_size=8, checkpointing=True)
>>> costs = costs_of(workload, find_machine("dgx-a100-80", 1))
>>> simulate(costs, Strategy.of("zenflow", update_interval=8)).stall_fraction < 0.1
True
"""
