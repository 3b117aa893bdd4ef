"""Settings of a quick run from an index, and marks that its photos deserve."""

QUICK = {"device": "cpu", "workers": 0, "learning_rate": 3e-3}


def mark_truly(index, queries, k=6):
    """Mark the first results of entries by the folders that their photos are in."""
    for query in queries:
        kind = query.split("/")[0]
        hits = [hit.id for hit in index.search(like=query, k=k)]
        same = [photo for photo in hits if photo.startswith(f"{kind}/")]
        index.marks.add(query, same=same, different=[photo for photo in hits if photo not in same])
