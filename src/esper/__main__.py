"""`esper`, and `python -m esper`."""

import signal
import sys


def main() -> int:
    """Run a command; returns its exit code. Ctrl-C during the imports ends the process, instead of raising in them."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from esper import cli

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
