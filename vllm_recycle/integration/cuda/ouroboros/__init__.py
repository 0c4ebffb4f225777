"""Ouroboros on Model Runner V2: speculator, rounds, draft forwards and the draft model's cache."""
