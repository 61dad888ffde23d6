"""Turn the results of an experiment into a report: measure first, then write tables, figures and the page."""

# Increase it when the meaning of a number or the layout of the page changes: older reports are then rebuilt.
# It is defined here because planning an experiment needs it and should not import the numerical libraries.
VERSION = 9
