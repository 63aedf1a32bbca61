"""Loss of a language model trained from scratch with ZenFlow, compared with its fine-tuning."""

from evidence.paper.shown import shown

STUDY = shown(
    "from_scratch",
    "accuracy",
    title="Held-out loss from scratch, where late updates hurt most, and in fine-tuning",
    minutes=0.1,
    exact=True,
)
