"""The run record: what happened in a run, as tables that SQL can query."""
