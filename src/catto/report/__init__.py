"""Numbers -> figures and pages: compute first, then draw."""
