"""Predictions -> numbers: metrics, intervals, calibrators, and the tables they read."""
