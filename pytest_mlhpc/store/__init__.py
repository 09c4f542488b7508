"""Records of what runs measured: what they hold, where they lie, and how they are found again."""
