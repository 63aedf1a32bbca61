"""Accuracy on a real task: sentiment of SST-2's sentences under every strategy.

``python -m experiments.studies.sst2 --data-dir FOLDER`` fine-tunes a pretrained encoder on
several seeds and writes a record: every run, a table with intervals and verdicts, a picture.
"""
