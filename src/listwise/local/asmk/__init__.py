"""ASMK*: visual words, the kernel, and the index that photos are searched in."""
