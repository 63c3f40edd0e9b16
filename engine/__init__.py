"""The decode engine: measures one run, knows nothing of jobs, SQL or Ray."""

__version__ = "0.1.0"
PROTOCOL = 1
"""Version of the line protocol between a run and its parent; a parent accepts N and N-1."""
