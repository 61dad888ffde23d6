"""Numbers -> figures and pages: compute first, then draw."""

# Increased when a number changes its meaning or the page its layout; reports of other versions are then built again.
# It is defined here because planning an experiment needs it, without importing the numerical libraries.
VERSION = 9
