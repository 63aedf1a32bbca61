"""Bytes of a run's checkpoint: the engine's states on a disk, each number once.

`zenflow.surface.state.compact` says what is left out because it follows from the rest, and
`experiments.training.parts.files.run_state` leaves out the model's weights that the optimizer
decides.
"""

from __future__ import annotations

from sim.memory.engine import EngineMemory

_STATES = 12
"""Bytes of an element's master and moments in float32, as residents have them."""
_FLOAT = 4


def checkpoint_bytes(memory: EngineMemory, *, by_ranks: bool = False) -> int:
    """Return the bytes of a checkpoint of all trained parameters, in the middle of a run.

    Under the exact rule one in S blocks has an update in flight, on average over steps.

    Args:
        memory: What one engine takes for the whole model.
        by_ranks: Whether several ranks write it, whose states leave nothing out.
    """
    if by_ranks:
        return _full_bytes(memory)
    own = _STATES * memory.resident + _column_states(memory) + memory.host.state
    return round(own + memory.deferred * _bytes_of_deferred(memory)) + memory.saved_vectors


def _column_states(memory: EngineMemory) -> int:
    """Return the bytes of important columns' masters and moments."""
    return (2 if memory.host.config.is_factored else 3) * _FLOAT * memory.important


def _bytes_of_deferred(memory: EngineMemory) -> float:
    """Return the bytes of a deferred element beside its master and moments."""
    config, size = memory.host.config, memory.dtype_bytes
    interval = config.update_interval
    if config.is_exact:
        if config.overlap_step:  # the weights of training, and those of updates in flight
            return size + size / interval
        return size if interval > 1 else 0  # nothing but a landing moves weights
    sums = _FLOAT if interval > 1 else 0
    return sums + (size if config.overlap_step else 0)  # what is in flight are masters


def _full_bytes(memory: EngineMemory) -> int:
    """Return the bytes of full states and of the model's own weights."""
    size = memory.dtype_bytes
    model = memory.num_params * size
    masters = _FLOAT if size < _FLOAT else 0  # float32 ones of residents are the model's
    residents = memory.resident * (2 * _FLOAT + masters)
    important = _column_states(memory)
    deferred = memory.host.state + 2 * size * memory.deferred + memory.host.sums
    return model + residents + important + deferred + memory.saved_vectors
