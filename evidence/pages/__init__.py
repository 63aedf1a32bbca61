"""Pages of docs/ that are made: the results from committed records, and the concepts' picture."""
