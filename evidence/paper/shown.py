"""Figures of the paper that a study of this project makes: its newest committed record, shown."""

from __future__ import annotations

from typing import Any

from experiments.lab import catalogue
from experiments.lab.record import committed
from experiments.lab.runner import Runner
from experiments.lab.study import Data, Job, NeedsInputError, Scope, Study, computed
from zenflow.host.limits import usable_cores


def shown(name: str, study: str, **fields: Any) -> Study:
    """Return the figure of this name that shows a study.

    It is made anew where the job has data for it; elsewhere it is read from the record.

    Args:
        name: Name of the figure.
        study: Key of the study.
        fields: Other fields of the figure.
    """

    def make(job: Job) -> Data:
        own = catalogue.load(study)
        if job.data_dir is not None:
            asked = Scope(data_dir=job.data_dir, model=job.model,
                          seeds=tuple(job.seed + seed for seed in own.seeds))  # fmt: skip
            record = Runner(study=own, scope=own.scope(asked), folder=job.folder / "record",
                            kept=job.folder / "kept", workers=usable_cores(),
                            progress=job.progress).run()  # fmt: skip
        else:
            found = committed(study)
            is_others = job.model is not None or job.seed != 0
            if found is None or not found.is_of(own) or is_others:
                options = "".join(f" --{use.replace('_', '-')}" for use in sorted(own.uses))
                raise NeedsInputError(
                    f"this figure shows the committed record of {study}, and there is none of "
                    "today's rule, or another model or seed is asked for: "
                    f"zenflow study {study}{options} makes it"
                )
            record = found
        return {"trained_at": record.commit, **record.data(own)}

    return computed(
        group=catalogue.PAPER,
        name=name,
        make=make,
        findings=lambda data: catalogue.load(study).findings(data),
        draw=lambda data: catalogue.load(study).draw(data),
        **fields,
    )
