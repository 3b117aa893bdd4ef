"""ASMK*: the codebook of visual words, the match kernel, and the inverted index."""
