"""The paper's comparisons: training runs that differ in one setting, and their results."""
