"""DELF: deep local features and their attention, extraction and training."""
