"""A gateway in front of an OpenAI-compatible server: answers with a calibrated confidence, or an abstention."""
