"""DELF: deep local features with attention; the network, extraction and training."""
