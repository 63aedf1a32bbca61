"""Accuracy of a pretrained encoder on SST-2's sentences, under every strategy."""

from evidence.paper.shown import shown

STUDY = shown(
    "accuracy",
    "sst2",
    title="Accuracy of a fine-tuned encoder on SST-2",
    minutes=50,
    uses=frozenset({"data_dir", "model"}),
)
