"""Beside: other strategies, upgrades and the largest model, beside a plan's choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sim.memory.need import memory_of
from sim.models.families import read_model
from sim.models.recomputation import Recomputation
from sim.models.table import find_model, model_names
from sim.models.workload import Workload
from sim.planning.choice import Choice, Chooser
from sim.planning.improvements import Improvement, faster_parts, more_memory
from sim.planning.options import Option
from sim.simulate import Strategy


class Beside:
    """Parts of a plan beside the choice: other strategies, upgrades, the largest model."""

    def __init__(self, chooser: Chooser, choice: Choice) -> None:
        """Take the chooser and its choice."""
        self._chooser = chooser
        self._choice = choice

    def rows(
        self,
        presets: Sequence[str],
        systems: Sequence[Strategy],
        checkpointing: Recomputation | None,
    ) -> Iterable[Option]:
        """Yield the best option of each strategy, on as many devices as the one that is shown."""
        search = self._choice.search
        if search is None:
            count = max(self._chooser.planners)
            search = self._chooser.search(count, self._chooser.workload)
        shown = self._choice.shown
        for name in presets:
            if shown is not None and shown.strategy.name == name:
                yield shown
                continue
            best = search.best(names=(name,))
            best = best or search.best(names=(name,), reserve=0.0, chance=0.0)
            yield best or search.option(search.nearest(name))
        for system in systems:
            option = search.planner.fitted(
                search.workload, system, recomputes=checkpointing is None
            )
            given = (f"{name}={value}" for name, value in system.options.items())
            yield replace(option, changes=(*given, *option.changes))

    def improvements(
        self, presets: Sequence[str], parallel: str, answer: Option | None = None
    ) -> Iterable[Improvement]:
        """Yield changes of the machine that would help, those to make first at the front.

        Where nothing surely fits, none is slower than the answer for the machine as it is; without
        an answer, than what may fit.
        """
        chosen, search = self._choice.recommended, self._choice.search
        if chosen is not None and search is not None:
            yield from faster_parts(chosen, search)
            return
        chooser = self._chooser
        works = chooser.works or [chooser.workload]
        # What one device needs, or where they share the model all of them.
        count = max(chooser.planners) if parallel == "fsdp" else 1
        searches = [chooser.search(count, work) for work in works]
        yield from more_memory(searches, presets, answer or self._choice.shown)

    def largest(self) -> str | None:
        """Return the largest named model, smaller than this one, that one device trains."""
        one, asked = self._chooser.planners[1], self._chooser.workload
        works = [
            Workload.of_config(
                *find_model(name), dtype=asked.dtype, sequence=asked.sequence, checkpointing=True
            )
            for name in model_names()
        ]
        works = [work for work in works if _is_smaller(work, asked)]
        for work in sorted(works, key=lambda work: -work.num_params):
            need = memory_of(work, "zero_offload", one.hardware)
            if not need.short_of(one.hardware, one.reserve, one.chance):
                return work.name
        return None


def _is_smaller(work: Workload, asked: Workload) -> bool:
    """Whether a model of the same kind has fewer parameters, and room for the sequence."""
    positions = read_model(find_model(work.name)[1])
    enough = positions.learned is None or (positions.positions or 0) >= asked.sequence
    return work.num_params < asked.num_params and work.is_causal == asked.is_causal and enough
