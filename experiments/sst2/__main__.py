"""``python -m experiments.sst2``."""

from experiments.sst2.command import main

if __name__ == "__main__":
    main()
