"""``python -m zenflow``: the command ``zenflow``, for launchers that start modules."""

from zenflow.console import main

if __name__ == "__main__":
    main()
