"""Tensor operations: attention back ends and fused ops, each with a torch reference."""
