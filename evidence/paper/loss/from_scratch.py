"""Where ZenFlow loses: a language model from scratch, beside the same model's fine-tuning."""

from evidence.paper.shown import shown

STUDY = shown(
    "from_scratch",
    "accuracy",
    title="Held-out loss from scratch, where late updates hurt most, and in fine-tuning",
    minutes=0.1,
    exact=True,
)
