"""Numbers -> figures and pages: compute first, then draw."""

# Raised when a number changes its meaning or the page its layout: a report of another version is built again.
# It is here because planning an experiment reads it and should not import the numerical libraries.
VERSION = 9
