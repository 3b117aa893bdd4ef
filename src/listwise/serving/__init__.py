"""Search for people and programs: `listwise.search.Index`, and the server around it, `app`."""
