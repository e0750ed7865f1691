"""The ``tunesmith`` script, and ``python -m tunesmith``: reports that it is starting while packages
are imported."""

from tunesmith.cli.standard_output import report_start
from tunesmith.records.garbage import collect_rarely, leave_all


def main() -> None:
    """Run the command."""
    report_start()
    collect_rarely()
    try:
        from tunesmith.cli.main import main

        main()
    except KeyboardInterrupt:  # while packages are imported: a command answers its own
        raise SystemExit(130) from None
    finally:
        leave_all()


if __name__ == "__main__":
    main()
