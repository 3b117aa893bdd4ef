"""The engine of an index in a folder: LanceDB holds the entries, FAISS searches them."""
