"""``python -m tunesmith``."""

from tunesmith.cli.main import main

if __name__ == "__main__":
    main()
