"""The run folder and the progress display: checkpoint, metrics, pictures."""
