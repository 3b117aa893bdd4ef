"""The engine of an index in a folder: SQLite for entries, FAISS for search."""
