"""Accuracy of a setting in the words of ``zenflow plan``: the nearest record, and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from experiments.commands.prediction.plan_beside import slowness
from experiments.commands.prediction.plan_run import Wishes, learning_rate
from experiments.recorded.nearest import Evidence, Training, evidence
from experiments.training.settings.training import TrainSettings
from sim.planning.rules import EXACT

if TYPE_CHECKING:
    from sim.planning.options import Option
    from sim.planning.plan import Plan


def evidence_of(option: Option, wishes: Wishes) -> Evidence | None:
    """Return the recorded loss of the rule nearest to an option; None without any."""
    config, work = option.strategy.config, option.need.workload
    if config is None or option.strategy.name not in ("zenflow", "zenflow_paper"):
        return None
    rate = learning_rate(wishes.model)
    return evidence(
        Training(
            rule=config.update_rule,
            topk_ratio=config.topk_ratio,
            update_interval=config.update_interval,
            host_state=config.host_state,
            gradient_link=config.gradient_link,
            lr=TrainSettings().lr if rate is None else rate,
            num_params=work.num_params,
            from_scratch=rate is None,
        )
    )


def accuracy(plan: Plan, chosen: Option, wishes: Wishes) -> Iterator[str]:
    """Yield the rule's effect on accuracy, and the setting to use where accuracy matters."""
    if chosen.strategy.name in EXACT:
        yield "Its rule is AdamW exactly, and so is its accuracy."
        return
    found = evidence_of(chosen, wishes)
    said = "No record has its loss: compare short runs." if found is None else str(found)
    config = chosen.strategy.config
    if config is not None and config.is_factored:
        said += " That record has both of AdamW's moments."
    text = f"Accuracy: {chosen.rule}. {said}"
    if plan.exact is not None:
        slower = slowness(chosen.tokens_per_second / plan.exact.tokens_per_second)
        yield (
            f"{text} To be sure, or to compare losses: {plan.exact.label} is AdamW exactly, at "
            f"{plan.exact.tokens_per_second:,.0f} tokens/s ({slower})."
        )
    elif plan.recommended is not None:
        yield f"{text} Nothing whose rule is AdamW exactly fits."
    else:
        yield text
