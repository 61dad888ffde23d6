"""Arithmetic on arrays: calibration errors, ranking, statistics, calibrators, temperature, selection. No files."""
