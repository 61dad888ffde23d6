"""Read the logs of other tools."""
