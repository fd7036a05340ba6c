"""`python -m esper` is `esper`."""

import sys

from esper.cli import main

sys.exit(main())
