"""What a run leaves and shows: run folders, the journal, live terminal data, TensorBoard files, the closing summary."""
