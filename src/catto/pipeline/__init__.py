"""Recipe -> graph of stages -> files. Finished stages are not run again, and a killed run resumes."""
