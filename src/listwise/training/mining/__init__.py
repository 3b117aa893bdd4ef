"""Mining of hard tuples for the triplet and contrastive losses."""
