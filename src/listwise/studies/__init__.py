"""The paper's comparisons: runs that differ in one thing, and what they came to."""
