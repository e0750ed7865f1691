"""The ``tunesmith`` script, and ``python -m tunesmith``: reports that it is starting while packages
are imported."""

from tunesmith.cli.standard_output import report_start


def main() -> None:
    """Run the command."""
    report_start()
    from tunesmith.cli.main import main

    main()


if __name__ == "__main__":
    main()
