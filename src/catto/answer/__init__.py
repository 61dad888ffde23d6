"""What a model answered: from the text of a response to a label, or to no answer."""
