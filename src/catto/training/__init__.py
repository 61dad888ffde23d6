"""The trainers that carry the objectives: preference training on TRL, supervised training on Transformers."""
