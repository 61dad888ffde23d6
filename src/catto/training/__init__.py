"""Trainers for the objectives: preference training builds on TRL, supervised training on Transformers."""
