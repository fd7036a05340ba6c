"""`python -m esper.cli` is `esper`."""

import sys

from esper.cli.main import main

sys.exit(main())
