"""The command line: esper train | evaluate | tasks."""

from esper.cli.main import main as main
