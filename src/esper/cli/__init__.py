"""The command line: esper train | evaluate | grow | export | search | tasks."""

from esper.cli.main import main as main
