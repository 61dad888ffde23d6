"""Recipes: typed, closed settings, and how a YAML file becomes them."""
