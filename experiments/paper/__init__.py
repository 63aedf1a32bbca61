"""The paper's figures made again: functions of a record, with verdicts on claims."""
