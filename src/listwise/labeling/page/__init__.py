"""The page to look through: what was kept, dropped, split, merged, and near-duplicates."""

from listwise.labeling.page.write import write_page

__all__ = ["write_page"]
