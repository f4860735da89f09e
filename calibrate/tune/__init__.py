"""`sim tune`: sweep, measure the leading configurations live, correct the profile, and sweep again."""
