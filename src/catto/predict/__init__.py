"""Ask a model: generate, read the label and its probability."""
