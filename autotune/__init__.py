"""Tuner: chooses the engine's settings, offline over the simulator or while a run goes on.

The tuner sees both sides, the engine's reports and the simulator's predictions, and steers through
``zenflow.AbstractController``. The objective is goodput, tokens per second times statistical
efficiency, never the step time alone.

====================================  ============================================================
``online``, while a run goes on       ``tuner`` has the options, ``tuning`` the run's controller
                                      and file; ``controller`` measures and changes by
                                      ``trial_rules``; ``zen_auto`` lets S follow the training
``adviser``, in a process of its own  what to try next, by a search of the refitted simulator
``model``                             the simulator refitted, its residual, the machine's noise
``decisions``                         what was measured and decided, in a file
``offline``, before a run             a study of trials over a backend for an objective
``efficiency, constraints, space``    shared by both
====================================  ============================================================
"""
