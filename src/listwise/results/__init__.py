"""A model on a benchmark: its figures, its table and its report page."""
