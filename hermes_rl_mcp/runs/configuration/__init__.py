"""What a run is told before it exists: the selection and its edits, resolved and checked."""
