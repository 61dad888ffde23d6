"""Recipe -> graph of stages -> files: what is done is never run again, what was killed goes on."""
