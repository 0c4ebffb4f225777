"""Ouroboros as published (arXiv 2402.13720): phrases, their pool, and drafts by them."""
