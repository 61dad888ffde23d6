"""A gateway for an OpenAI-compatible server: it answers with a calibrated confidence, or abstains."""
