"""Turn a recipe into a graph of stages and run it. Finished stages are not run again, and a killed run resumes."""
