"""Read answers and confidences from the responses of a model."""
