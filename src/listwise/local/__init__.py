"""Local features, their aggregation, and spatial verification."""
