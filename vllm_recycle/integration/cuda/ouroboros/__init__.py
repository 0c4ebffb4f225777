"""Ouroboros on Model Runner V2: drafters, their speculator, rounds and the draft model's cache."""
