"""Read and write files: atomic writes, resumable journals and readers for every input format."""
