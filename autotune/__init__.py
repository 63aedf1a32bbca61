"""TrialRules: chooses the engine's settings, offline over the simulator or while a run goes on.

It sees both sides, the engine's reports and the simulator's predictions, and steers through
``zenflow.AbstractController``. What it optimises is goodput, tokens per second times statistical
efficiency, never the step time alone.

====================  =====================================================================
while a run goes on   ``twin_controller`` measures and changes; ``tuner`` has the rules of
                      trying, keeping and going back; ``advice`` refits (``refit``,
                      ``residual``) and searches the simulator (``twin``) in a process of its
                      own (``background``); ``zen_auto`` lets S follow the training;
                      ``decisions`` writes it all down
before a run          ``study`` searches over a backend (``backends``) for an ``objective``
both                  ``efficiency``, ``constraints``, ``space``
====================  =====================================================================
"""
