"""``python -m experiments.studies.sst2``."""

from experiments.studies.sst2.command import main

if __name__ == "__main__":
    main()
