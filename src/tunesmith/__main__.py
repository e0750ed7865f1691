"""The ``tunesmith`` script, and ``python -m tunesmith``: reports that it is starting while packages
are imported."""

import gc

from tunesmith.cli.standard_output import report_start
from tunesmith.records.garbage import collect_rarely


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
        gc.freeze()  # the process ends: its memory is returned at once


if __name__ == "__main__":
    main()
