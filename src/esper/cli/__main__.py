"""`python -m esper.cli` is `esper`."""

import sys

from esper.cli import main

sys.exit(main())
