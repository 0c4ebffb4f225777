"""Trees, the adjacency matrix, proposers and verification: torch only, no vllm, no triton."""
