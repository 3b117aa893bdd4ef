"""Search for people and programs: `searcher.Searcher`, and the server around it, `app`."""
