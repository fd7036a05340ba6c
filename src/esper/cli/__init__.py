"""The command line: esper train | evaluate | grow | export | tasks."""

from esper.cli.main import main as main
