"""Loss with formats of few bytes in the larger model, on more seeds than one."""

from __future__ import annotations

from evidence.studies.host_state import draw, kept, run
from evidence.studies.host_state_seeds import cells_of, findings_of, tables_of
from experiments.lab.study import Data, Study

REPEATED = ("10.7M parameters",)
"""Settings of `evidence.studies.host_state` that have one seed there."""


def _about(data: Data) -> str:
    del data
    return (
        "The larger model of `zenflow study host_state`, 10.7M parameters from random weights at "
        "1e-3, which has one seed there, on other seeds. Float32 from first weights that differ "
        "by 0.1% shows the difference that means nothing."
    )


STUDY = Study(
    name="host_state_larger",
    title="Held-out loss with compact host state, 10.7M parameters",
    cells=lambda scope: cells_of(REPEATED, scope),
    run=run,
    summarise=lambda rows, _: {"rows": kept(rows)},
    findings=findings_of,
    about=_about,
    tables=tables_of,
    draw=draw,
    seeds=(3, 4, 5),
    minutes=200,
)
