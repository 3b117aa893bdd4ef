"""What a run leaves behind and shows: checkpoint, metrics, pictures, progress."""
